"""Serve requests with one vLLM engine and write what it answered: run_engine.py REQUEST.json RESULT.json

REQUEST.json
    engine      options of vllm.LLM
    rounds      lists of requests; a round starts when the one before is answered
    logprobs    whether to return the log-probabilities of generated tokens
    recompile   whether to serve the last round once more after the sparse MLA
                kernels were forgotten, to see that compilations are seen
    select      a request with `forced` tokens, served alone after all rounds, or null
    drafts      requests, served one by one after all rounds, for which to keep the
                logits of a draft model; without CUDA graphs

A request has `prompt` (token ids) and may have `num_generated` (greedy tokens)
or `forced` (the tokens to decode instead), `prompt_logprobs`, `distributions` (the
size of the vocabulary: return the log-probabilities of all its tokens), `skip_cache`
(do not read the prefix cache), and `after_steps`, the engine steps of its round
after which it arrives.

RESULT.json
    workers     what `describe` returns, for each worker
    rounds      for each: the answers in the order of the requests, and what was
                compiled just in time while they were served, as [runtime, kernel];
                `distributions` of an answer is a file of torch.save: fp32
                [tokens, vocabulary] of the `prompt` but for its first token, and
                of what was `generated`
    code        for each of a worker's Triton kernels whether its code has fp8 instructions
    kernels     the names of our kernels, which `recompile` forgets
    recompiled  what was compiled in the round after they were forgotten
    selected    file of what the indexers selected for `select` without CUDA graphs: by
                layer int32 [tokens, top-k], for every token but the last, by torch.save
    drafts      the answers to the requests of that name, each with `draft_logits`, a file
                of torch.save: fp32 [steps, vocabulary], what the draft model proposes
                in each step of the engine by
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind


def describe(worker) -> dict[str, Any]:
    """Return what a worker runs, and on which (claimed) capability."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.ops.e4m3 import SOFTWARE_E4M3
    from vllm.v1.attention.ops.mqa_logits_backend import use_triton_mqa_logits

    layers = [m for m in worker.get_model().modules() if hasattr(m, "attn_backend") and hasattr(m, "impl")]
    types = [p for name, p in worker.get_model().named_parameters() if name.endswith("qweight_type")]
    return {
        "backends": sorted({layer.attn_backend.get_name() for layer in layers}),
        "kv_row_bytes": sorted({layer.kv_cache.shape[-1] * layer.kv_cache.element_size() for layer in layers}),
        "capability": current_platform.get_device_capability().as_version_str(),
        "graphs": worker.vllm_config.compilation_config.cudagraph_mode.name,
        "flash_attention": get_flash_attn_version(),
        "software_e4m3": SOFTWARE_E4M3.value,
        "triton_indexer": use_triton_mqa_logits(),
        "gguf_cuda": "vllm_gguf_plugin" in sys.modules and sys.modules["vllm_gguf_plugin.ops"]._CUDA_ENABLED,
        "gguf_types": sorted({t for p in types for t in (p.weight_type, *p.shard_weight_type.values())}),
        "topk_widths": sorted({layer.impl.topk_indices_buffer.shape[1] for layer in layers}),
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


# What computes sparse attention: our modules, then upstream's.
OUR_KERNELS = [
    "vllm.v1.attention.ops.triton_mla_sparse",
    "vllm.v1.attention.ops.gluon_mla_sparse",
    "vllm.v1.attention.ops.gluon_mla_sparse_sm90",
    "vllm.v1.attention.ops.gluon_union_rows",
    "vllm.v1.attention.ops.triton_mqa_logits",
]
KERNELS = [*OUR_KERNELS, "vllm.models.deepseek_v32.common.kernels", "vllm.v1.attention.ops.common"]


def triton_kernels(modules: list[str]) -> dict[str, Any]:
    """Return the Triton kernels of modules by qualified name, those in their classes included."""
    from importlib import import_module

    from triton import JITFunction

    found = {}
    for module in map(import_module, modules):
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        for value in (value for holder in (module, *classes) for value in vars(holder).values()):
            kernel = value.__func__ if isinstance(value, staticmethod) else value
            if isinstance(kernel, JITFunction):
                found[kernel.__qualname__] = kernel
    return found


def describe_code(worker) -> dict[str, bool]:
    """Return for each compiled kernel whether an fp8 instruction is in the code of any of its variants."""
    instruction = re.compile(r"\b(?:cvt|mma|wgmma)\.[\w.:]*e4m3")
    code: dict[str, bool] = {}
    for name, kernel in triton_kernels(KERNELS).items():
        for kernels, *_ in kernel.device_caches.values():
            for compiled in kernels.values():
                code[name] = code.get(name, False) or instruction.search(compiled.asm["ptx"]) is not None
    return code


def record_selections(worker) -> None:
    """Keep what the indexer of every layer selects from now on."""
    from vllm.models.deepseek_v32 import attention

    attention.selected = {}
    select = attention.sparse_attn_indexer

    def select_and_keep(hidden_states, layer, *args, **kwargs):
        buffer = select(hidden_states, layer, *args, **kwargs)
        attention.selected.setdefault(str(layer), []).append(buffer[: hidden_states.shape[0]].cpu())
        return buffer

    attention.sparse_attn_indexer = select_and_keep


def write_selections(worker, path: str) -> None:
    """Write what was kept, by the number of the layer."""
    from vllm.models.deepseek_v32 import attention

    selected = {int(re.search(r"layers\.(\d+)\.", layer)[1]): rows for layer, rows in attention.selected.items()}
    torch.save({layer: torch.cat(rows) for layer, rows in selected.items()}, path)


def record_drafts(worker) -> None:
    """Keep the logits that the draft model computes from now on."""
    model = worker.model_runner.speculator.model
    compute = model.compute_logits
    worker.draft_logits = []

    def compute_and_keep(*args, **kwargs):
        logits = compute(*args, **kwargs)
        worker.draft_logits.append(logits.float().cpu())
        return logits

    model.compute_logits = compute_and_keep


def take_drafts(worker, path: str | None = None) -> None:
    """Forget what was kept since the last call; write it, if there is a path."""
    if path is not None:
        torch.save(torch.cat(worker.draft_logits), path)
    worker.draft_logits = []


def forget_kernels(worker) -> None:
    """Make the next launch of each of our kernels look like its first."""
    from vllm.utils import jit_monitor

    jit_monitor.forgotten = []  # CUDA graphs launch them still, and Triton unloads what nobody refers to
    for kernel in triton_kernels(OUR_KERNELS).values():
        jit_monitor.forgotten.append(dict(kernel.device_caches))
        kernel.device_caches.clear()


def distributions(logprobs: FlatLogprobs, vocab_size: int) -> torch.Tensor:
    """Return the log-probabilities of all tokens, fp32 [positions, vocabulary]."""
    ids = torch.tensor(logprobs.token_ids).view(-1, vocab_size + 1)  # a chosen token comes first, and again
    values = torch.tensor(logprobs.logprobs).view_as(ids)
    return torch.empty(len(ids), vocab_size).scatter_(1, ids, values)


def answer(output: RequestOutput, vocab_size: int | None) -> dict[str, Any]:
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
        "distributions": vocab_size
        and {
            "prompt": output.prompt_logprobs and distributions(output.prompt_logprobs, vocab_size),
            "generated": distributions(completion.logprobs, vocab_size),
        },
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
            num_logprobs = request.get("distributions", 0)
            sampling = SamplingParams(
                temperature=0.0,
                seed=0,
                max_tokens=len(forced) if forced else request["num_generated"],
                ignore_eos=True,
                logprobs=num_logprobs if logprobs else None,
                prompt_logprobs=num_logprobs if request.get("prompt_logprobs") else None,
                flat_logprobs=bool(num_logprobs),
                trace_decode_token_ids=forced,
                skip_reading_prefix_cache=request.get("skip_cache"),
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(index), tokens_input(request["prompt"]), sampling)
        for output in engine.step():
            if output.finished:
                index = int(output.request_id)
                answers[index] = answer(output, requests[index].get("distributions"))
        step += 1
    return [answers[index] for index in range(len(requests))]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(skip_tokenizer_init=True, **job["engine"])
    llm.collective_rpc(watch_compilations)

    def compilations() -> list[list[str]]:
        return [report for worker in llm.collective_rpc(take_compilations) for report in worker]

    result: dict[str, Any] = {"workers": llm.collective_rpc(describe), "rounds": []}
    for number, requests in enumerate(job["rounds"]):
        answers = serve(llm, requests, logprobs=job["logprobs"])
        for index, found in enumerate(answers):
            if found["distributions"]:
                path = Path(f"distributions-{number}-{index}.pt").resolve()
                torch.save(found["distributions"], path)
                found["distributions"] = str(path)
        result["rounds"].append({"answers": answers, "compiled": compilations()})
    result["code"] = llm.collective_rpc(describe_code)[0]
    if job["select"]:
        llm.collective_rpc(record_selections)
        serve(llm, [job["select"]])
        result["selected"] = str(Path("selected.pt").resolve())
        llm.collective_rpc(write_selections, args=(result["selected"],))
    if job["drafts"]:
        llm.collective_rpc(record_drafts)
        result["drafts"] = []
        for index, request in enumerate(job["drafts"]):
            llm.collective_rpc(take_drafts)
            (found,) = serve(llm, [request])
            found["draft_logits"] = str(Path(f"drafts-{index}.pt").resolve())
            llm.collective_rpc(take_drafts, args=(found["draft_logits"],))
            result["drafts"].append(found)
    if job["recompile"]:
        llm.collective_rpc(forget_kernels)
        serve(llm, job["rounds"][-1], logprobs=job["logprobs"])
        result["kernels"] = sorted(triton_kernels(OUR_KERNELS))
        result["recompiled"] = compilations()
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
