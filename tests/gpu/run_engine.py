"""Run one vLLM engine and write what it computed: run_engine.py REQUEST.json RESULT.json

The request holds the engine's options, the prompts as token ids and how many
tokens to generate. The result holds, per prompt, all token ids and the
log-probability of every token but the first.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform


def describe(model) -> dict:
    """Return which attention backends a worker runs, on which (claimed) capability."""
    layers = [m for m in model.modules() if hasattr(m, "attn_backend") and hasattr(m, "impl")]
    return {
        "backends": sorted({layer.attn_backend.get_name() for layer in layers}),
        "capability": current_platform.get_device_capability().as_version_str(),
    }


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(skip_tokenizer_init=True, **request["engine"])
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=request["num_generated"],
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    sequences = []
    for output in llm.generate(prompts, sampling):
        token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        sequences.append(
            {
                "token_ids": token_ids,
                "logprobs": [entry[i].logprob for entry, i in zip(entries, token_ids[1:], strict=True)],
            }
        )
    result = {**llm.apply_model(describe)[0], "sequences": sequences}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
