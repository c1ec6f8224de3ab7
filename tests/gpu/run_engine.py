"""Serve requests with one vLLM engine and write what it answered: run_engine.py REQUEST.json RESULT.json

REQUEST.json
    engine      options of vllm.LLM
    rounds      lists of requests; a round starts when the one before is answered
    logprobs    whether to return the log-probabilities of generated tokens
    recompile   whether to serve the last round once more after the sparse MLA
                kernels were forgotten, to see that compilations are seen

A request has `prompt` (token ids) and may have `num_generated` (greedy tokens)
or `forced` (the tokens to decode instead), `prompt_logprobs`, `skip_cache` (do not
read the prefix cache), and `after_steps`, the engine steps of its round after
which it arrives.

RESULT.json
    workers     what `describe` returns, for each worker
    rounds      for each: the answers in the order of the requests, and what was
                compiled just in time while they were served, as [runtime, kernel]
    kernels     the names of the sparse MLA kernels
    recompiled  what was compiled in the round after they were forgotten
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind


def describe(worker) -> dict[str, Any]:
    """Return what a worker runs, and on which (claimed) capability."""
    from vllm.platforms import current_platform

    layers = [m for m in worker.get_model().modules() if hasattr(m, "attn_backend") and hasattr(m, "impl")]
    return {
        "backends": sorted({layer.attn_backend.get_name() for layer in layers}),
        "kv_row_bytes": sorted({layer.kv_cache.shape[-1] * layer.kv_cache.element_size() for layer in layers}),
        "capability": current_platform.get_device_capability().as_version_str(),
        "graphs": worker.vllm_config.compilation_config.cudagraph_mode.name,
    }


def watch_compilations(worker) -> None:
    """Keep what vLLM's JIT monitor reports: anything compiled after the warm-up, by Triton, CuTe DSL or TileLang."""
    import logging

    from vllm.utils import jit_monitor

    jit_monitor.reported = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.args, tuple) and len(record.args) == 4:
                runtime, _, kernel, _ = record.args
                jit_monitor.reported.append([runtime, kernel])

    jit_monitor.logger.addHandler(Keep())


def take_compilations(worker) -> list[list[str]]:
    """Return what was reported since the last call."""
    from vllm.utils import jit_monitor

    reported, jit_monitor.reported = jit_monitor.reported, []
    return reported


def sparse_mla_kernels() -> dict[str, Any]:
    """Return the Triton kernels of sparse MLA attention by name."""
    from triton import JITFunction
    from vllm.v1.attention.ops import triton_mla_sparse

    return {kernel.__name__: kernel for kernel in vars(triton_mla_sparse).values() if isinstance(kernel, JITFunction)}


def forget_kernels(worker) -> None:
    """Make the next launch of every sparse MLA kernel look like its first."""
    from vllm.utils import jit_monitor

    jit_monitor.forgotten = []  # CUDA graphs launch them still, and Triton unloads what nobody refers to
    for kernel in sparse_mla_kernels().values():
        jit_monitor.forgotten.append(dict(kernel.device_caches))
        kernel.device_caches.clear()


def answer(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    speculation = completion.spec_decode_metrics
    prompt_ids = output.prompt_token_ids
    return {
        "generated": list(completion.token_ids),
        "logprobs": completion.logprobs
        and [entry[i].logprob for entry, i in zip(completion.logprobs, completion.token_ids, strict=True)],
        "prompt_logprobs": output.prompt_logprobs
        and [entry[i].logprob for entry, i in zip(output.prompt_logprobs[1:], prompt_ids[1:], strict=True)],
        "num_cached": output.num_cached_tokens or 0,
        "num_drafted": speculation and speculation.num_draft_tokens,
        "num_accepted": speculation and sum(n * steps for n, steps in enumerate(speculation.histogram)),
    }


def serve(llm: LLM, requests: list[dict[str, Any]], *, logprobs: bool = True) -> list[dict[str, Any]]:
    """Serve requests as they arrive and return their answers."""
    engine = llm.llm_engine
    arriving = sorted(enumerate(requests), key=lambda item: item[1].get("after_steps", 0))
    answers: dict[int, dict[str, Any]] = {}
    step = 0
    while len(answers) < len(requests):
        while arriving and (arriving[0][1].get("after_steps", 0) <= step or not engine.has_unfinished_requests()):
            index, request = arriving.pop(0)
            forced = request.get("forced")
            sampling = SamplingParams(
                temperature=0.0,
                seed=0,
                max_tokens=len(forced) if forced else request["num_generated"],
                ignore_eos=True,
                logprobs=0 if logprobs else None,
                prompt_logprobs=0 if request.get("prompt_logprobs") else None,
                trace_decode_token_ids=forced,
                skip_reading_prefix_cache=request.get("skip_cache"),
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(index), tokens_input(request["prompt"]), sampling)
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = answer(output)
        step += 1
    return [answers[index] for index in range(len(requests))]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(skip_tokenizer_init=True, **job["engine"])
    llm.collective_rpc(watch_compilations)

    def compilations() -> list[list[str]]:
        return [report for worker in llm.collective_rpc(take_compilations) for report in worker]

    result: dict[str, Any] = {"workers": llm.collective_rpc(describe), "rounds": []}
    for requests in job["rounds"]:
        result["rounds"].append({"answers": serve(llm, requests, logprobs=job["logprobs"]), "compiled": compilations()})
    if job["recompile"]:
        llm.collective_rpc(forget_kernels)
        serve(llm, job["rounds"][-1], logprobs=job["logprobs"])
        result["kernels"] = sorted(sparse_mla_kernels())
        result["recompiled"] = compilations()
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
