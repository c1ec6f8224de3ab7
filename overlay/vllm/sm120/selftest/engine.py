# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One real engine on the tiny GLM-5, with CUDA graphs.

python -m vllm.sm120.selftest.engine EVENTS MODEL DTYPE

It serves one prompt that fits top-k and one that goes beyond it, decodes given tokens
after each (vLLM's trace replay), so that all is compared with one reference, then
batches of other sizes. vLLM's JIT monitor watches from the end of the warm-up on.
"""

import sys
from typing import Any

from vllm.sm120.selftest.child import Events
from vllm.sm120.selftest.model import LONG, NUM_TOPK, SHORT, tokens
from vllm.sm120.selftest.report import FAILED, PASSED, Check

BACKEND = "TRITON_MLA_SPARSE"
DTYPES = ("float16", "bfloat16")
OPTIONS: dict[str, Any] = {
    "attention_backend": BACKEND,
    "skip_tokenizer_init": True,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 4096,
    "gpu_memory_utilization": 0.05,
    # A fixed size: the engines start side by side and must not measure each other.
    "kv_cache_memory_bytes": 1 << 30,
    "enable_prefix_caching": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
    "jit_monitor_verbose": True,
    "enable_trace_replay": True,
}
ENVIRONMENT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the workers get functions from here
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

# The modules of this distribution, new and patched, that have kernels (Triton's and
# Gluon's; the other runtimes that the JIT monitor watches have none of ours).
OUR_MODULES = (
    "vllm.model_executor.layers.sparse_attn_indexer",
    "vllm.models.deepseek_v32.common.kernels",
    "vllm.models.glm5next.nvidia.ops.kpool_compress",
    "vllm.v1.attention.backends.mla.indexer",
    "vllm.v1.attention.backends.mla.sparse_utils",
    "vllm.v1.attention.ops.common",
    "vllm.v1.attention.ops.e4m3",
    "vllm.v1.attention.ops.gluon_mla_sparse",
    "vllm.v1.attention.ops.gluon_mla_sparse_sm90",
    "vllm.v1.attention.ops.gluon_union_rows",
    "vllm.v1.attention.ops.triton_mla_sparse",
    "vllm.v1.attention.ops.triton_mqa_logits",
)

# Mean |difference| of log-probabilities that FLASH_ATTN_MLA_SPARSE, SM90's native
# backend, has on this model and these prompts (benchmarks/results/engine-h200.json of
# the distribution): over the short prompt, over the tokens of the long one beyond
# top-k, over the tokens decoded after it. Most of it beyond top-k are the indexer's
# fp8 keys, which any backend has.
NATIVE = {
    "float16": {"prompt": 0.00158, "beyond top-k": 0.0467, "decoded": 0.0683},
    "bfloat16": {"prompt": 0.0133, "beyond top-k": 0.0486, "decoded": 0.0660},
}
# How far above it a right engine may be: other GPUs round elsewhere, and the decoded
# tokens are 64 only.
MARGIN = {"prompt": 0.003, "beyond top-k": 0.01, "decoded": 0.025}


def compare(
    dtype: str, answers: list[dict[str, Any]], reference: dict[str, list[float]]
) -> list[Check]:
    """Return the checks of what an engine answered to `requests`."""
    short_prompt, _, long_prompt, decoded = answers
    expected = {length: reference[str(length)] for length in (SHORT, LONG)}
    pairs = {
        "prompt": (short_prompt["prompt"], expected[SHORT][: SHORT - 1]),
        "beyond top-k": (
            long_prompt["prompt"][NUM_TOPK:],
            expected[LONG][NUM_TOPK : LONG - 1],
        ),
        "decoded": (decoded["decoded"], expected[LONG][LONG - 1 :]),
    }
    checks = []
    for name, (found, right) in pairs.items():
        error = sum(abs(a - b) for a, b in zip(found, right, strict=True)) / len(right)
        limit = NATIVE[dtype][name] + MARGIN[name]
        status = PASSED if error <= limit else FAILED  # NaN fails
        title = f"log-probabilities, {name}"
        checks.append(Check(f"engine {dtype}", title, status, error, limit))
    return checks


def check_engine(
    dtype: str, worker: dict[str, Any], compiled: list[list[str]]
) -> list[Check]:
    """Return the checks of how an engine ran.

    `compiled` is what `take_compilations` returns. A kernel of this distribution must
    not be in it. Upstream's may, and are told: the warm-up does not know all of them.
    """

    def check(name: str, is_right: bool, detail: str) -> Check:
        status = PASSED if is_right else FAILED
        return Check(f"engine {dtype}", name, status, detail=detail)

    ours, others = set(), set()
    for runtime, kernel, module in compiled:
        late = ours if module in OUR_MODULES else others
        late.add(f"{kernel} ({runtime})")
    found = ", ".join(sorted(ours))
    if others:
        found += "; besides, " if ours else ""
        found += f"upstream's, which is no failure: {', '.join(sorted(others))}"
    return [
        check(
            "backend", worker["backends"] == [BACKEND], ", ".join(worker["backends"])
        ),
        check("CUDA graphs", "FULL" in worker["graphs"], worker["graphs"]),
        check("the JIT monitor watches", worker["is_watched"], ""),
        check("compiled after the warm-up", not ours, found),
    ]


def requests() -> list[dict[str, Any]]:
    """Return what is compared: each prompt, then its tokens decoded one by one."""
    asked = []
    for length in (SHORT, LONG):
        prompt, forced = tokens(length)[:length], tokens(length)[length:]
        asked.append({"prompt": prompt, "num_generated": 1, "prompt_logprobs": True})
        asked.append({"prompt": prompt, "forced": forced})
    return asked


def other_batches() -> list[list[dict[str, Any]]]:
    """Return batches of 1 to 7 prompts around the sizes at which kernels change."""
    lengths = [1, 2, 63, 64, 65, 2047, 2048, 2049, 2500]
    return [
        [
            {"prompt": tokens(length)[:length], "num_generated": 3 + length % 5}
            for length in lengths[start : start + size]
        ]
        for start, size in ((0, 1), (1, 2), (3, 3), (4, 5), (2, 7))
    ]


def serve(llm: Any, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serve requests together and return the log-probabilities of their tokens."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    for index, request in enumerate(asked):
        forced = request.get("forced")
        sampling = SamplingParams(
            temperature=0.0,
            seed=0,
            max_tokens=len(forced) if forced else request["num_generated"],
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if request.get("prompt_logprobs") else None,
            trace_decode_token_ids=forced,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(index), tokens_input(request["prompt"]), sampling)
    answers: dict[int, dict[str, Any]] = {}
    while len(answers) < len(asked):
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = _answer(output)
    for index, request in enumerate(asked):
        if request.get("forced") not in (None, answers[index]["tokens"]):
            raise RuntimeError("vLLM did not decode the given tokens")
    return [answers[index] for index in range(len(asked))]


def _answer(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    pairs = zip(completion.logprobs, ids, strict=True)
    answer = {"tokens": ids, "decoded": [entry[i].logprob for entry, i in pairs]}
    if output.prompt_logprobs:
        pairs = zip(
            output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True
        )
        answer["prompt"] = [entry[i].logprob for entry, i in pairs]
    return answer


def describe(worker: Any) -> dict[str, Any]:
    """Return what a worker runs; called in its process."""
    from vllm.utils import jit_monitor
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.ops.e4m3 import SOFTWARE_E4M3
    from vllm.v1.attention.ops.mqa_logits_backend import _choose

    modules = worker.get_model().modules()
    layers = [m for m in modules if hasattr(m, "attn_backend") and hasattr(m, "impl")]
    use_triton, reason = _choose()
    return {
        "backends": sorted({layer.attn_backend.get_name() for layer in layers}),
        "graphs": worker.vllm_config.compilation_config.cudagraph_mode.name,
        "indexer": f"{'Triton' if use_triton else 'DeepGEMM'} ({reason})",
        "software_e4m3": bool(SOFTWARE_E4M3.value),
        "flash_attention": get_flash_attn_version(),
        "is_watched": jit_monitor.is_active(),
    }


def watch_compilations(worker: Any) -> None:
    """Keep what the JIT monitor reports; called in the worker's process."""
    import logging

    from triton import knobs

    from vllm.utils import jit_monitor

    worker.compilations = compilations = []
    modules: dict[str, str] = {}  # of Triton's kernels, which the monitor does not tell
    report = knobs.runtime.jit_post_compile_hook

    def keep_module(**event: Any) -> Any:
        modules[event["fn"].name] = event["fn"].module
        return report(**event)

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # (runtime, event, kernel, detail); it logs nothing else with arguments.
            if isinstance(record.args, tuple) and len(record.args) == 4:
                runtime, _, kernel, _ = record.args
                module = modules.get(kernel, "") if runtime == "Triton" else ""
                compilations.append([runtime, kernel, module])

    if report is not None:
        knobs.runtime.jit_post_compile_hook = keep_module
    jit_monitor.logger.addHandler(Keep())


def take_compilations(worker: Any) -> list[list[str]]:
    """Return what was compiled: runtime, kernel and, of Triton's, its module."""
    return list(worker.compilations)


def main() -> None:
    path, model, dtype = sys.argv[1:]
    events = Events(path)
    events.emit("step", what="starting the engine")
    from vllm import LLM

    llm = LLM(model=model, dtype=dtype, **OPTIONS)
    llm.collective_rpc(watch_compilations)
    (worker,) = llm.collective_rpc(describe)
    asked = requests()
    events.emit("step", what=f"serving a prompt of {SHORT} tokens")
    answers = serve(llm, asked[:2])
    events.emit("step", what=f"serving a prompt of {LONG} tokens, beyond top-k")
    answers += serve(llm, asked[2:])
    for batch in other_batches():
        events.emit("doing", what=f"serving a batch of {len(batch)}")
        serve(llm, batch)
    (compiled,) = llm.collective_rpc(take_compilations)
    events.emit("answers", worker=worker, compiled=compiled, content=answers)
    events.emit("done")


if __name__ == "__main__":
    main()
