"""Time the whole engine with TRITON_MLA_SPARSE beside the native backend of SM90.

    python -m benchmarks.engine --results benchmarks/results

A tiny GLM-5 (4 layers, 8 heads) in float16 with CUDA graphs decodes 128 tokens
for 32 requests, once after short prompts and once past top-k. Each backend has
an engine in a process of its own; both stay, and take turns. What they answer is
compared with transformers in float32 first; a wrong answer ends the run. Prompts
are in the prefix cache by then, so that what is timed is decoding. A last round is
profiled: `gpu_seconds` are those in which the GPU works. The step of so small a
model is the host's more than the GPU's, and how fast an engine's host process is
depends on where the system puts it.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from vllm import LLM

from benchmarks import profile
from tests.gpu.engine import COMMON_OPTIONS
from tests.gpu.results import gpu_slug, write_results
from tests.gpu.run_engine import describe, serve
from tests.gpu.tiny_glm import NUM_HEADS, VOCAB_SIZE, Reference, make_model

OURS, NATIVE = BACKENDS = ("TRITON_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")
NUM_REQUESTS = 32
NUM_TOKENS = 128
PROMPT_LENGTHS = [16, 3000]
OPTIONS = COMMON_OPTIONS | {
    "dtype": "float16",
    "max_model_len": 4096,
    "max_num_seqs": NUM_REQUESTS,
    "enable_prefix_caching": True,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]},
}
# Mean |difference| of log-probabilities to the reference: five times what fp16 and
# the indexer's fp8 keys cause; a wrong token is off by more than 1.
MAX_ERROR = 0.15
CHECKED = 2  # requests of a round that are compared with the reference


def make_requests(length: int, num_tokens: int) -> list[dict[str, Any]]:
    requests = []
    for request in range(NUM_REQUESTS):
        rng = random.Random(1000 * length + request)
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        requests.append({"prompt": prompt, "num_generated": num_tokens})
    return requests


def check(backend: str, llm: LLM, length: int, reference: Reference) -> float:
    """Serve a round, which fills the prefix cache, and return its error, or end the run."""
    requests = make_requests(length, NUM_TOKENS)
    errors = []
    for request, answer in zip(requests[:CHECKED], serve(llm, requests), strict=False):
        expected = reference.chosen(request["prompt"] + answer["generated"])[-NUM_TOKENS:]
        errors.append((torch.tensor(answer["logprobs"]) - expected).abs().mean().item())
    if not all(error <= MAX_ERROR for error in errors):  # NaN included
        sys.exit(f"{backend}: wrong answers after {length} tokens, mean errors {errors}")
    return max(errors)


def seconds(llm: LLM, requests: list[dict[str, Any]]) -> float:
    start = time.perf_counter()
    serve(llm, requests, logprobs=False)
    return time.perf_counter() - start


def measure(engines: dict[str, LLM], length: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median time of a round by backend, and of its part after the first tokens."""
    one, all_tokens = make_requests(length, 1), make_requests(length, NUM_TOKENS)
    whole: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    decode: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for turn in range(rounds):
        for backend in BACKENDS if turn % 2 else reversed(BACKENDS):
            first = seconds(engines[backend], one)
            whole[backend].append(seconds(engines[backend], all_tokens))
            decode[backend].append(whole[backend][-1] - first)
    return {backend: {"whole": median(whole[backend]), "decode": median(decode[backend])} for backend in BACKENDS}


def gpu_seconds(llm: LLM, length: int) -> float:
    """Return the seconds in which the GPU works in a round."""
    llm.collective_rpc(profile.start)
    serve(llm, make_requests(length, NUM_TOKENS), logprobs=False)
    return llm.collective_rpc(profile.stop)[0]


def row(engines: dict[str, LLM], length: int, rounds: int, reference: Reference) -> dict[str, Any]:
    errors = {backend: check(backend, llm, length, reference) for backend, llm in engines.items()}
    times = measure(engines, length, rounds)
    gpu = {backend: gpu_seconds(llm, length) for backend, llm in engines.items()}
    result = {
        "model": "tiny-glm",
        "heads": NUM_HEADS,
        "dtype": OPTIONS["dtype"],
        "kv": "auto",
        "graphs": engines[OURS].collective_rpc(describe)[0]["graphs"],
        "requests": NUM_REQUESTS,
        "tokens": NUM_TOKENS,
        "prompt": length,
        "backend": OURS,
        "seconds": round(times[OURS]["whole"], 4),
        "decode_seconds": round(times[OURS]["decode"], 4),
        "gpu_seconds": round(gpu[OURS], 4),
        "error": round(errors[OURS], 5),
        "native": NATIVE,
        "native_seconds": round(times[NATIVE]["whole"], 4),
        "native_decode_seconds": round(times[NATIVE]["decode"], 4),
        "native_gpu_seconds": round(gpu[NATIVE], 4),
        "native_error": round(errors[NATIVE], 5),
        "ratio": round(times[OURS]["whole"] / times[NATIVE]["whole"], 3),
        "decode_ratio": round(times[OURS]["decode"] / times[NATIVE]["decode"], 3),
        "gpu_ratio": round(gpu[OURS] / gpu[NATIVE], 3),
    }
    print(result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="folder to write the JSON file to")
    parser.add_argument("--rounds", type=int, default=9, help="rounds per backend and prompt length")
    args = parser.parse_args()

    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `describe`
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process uses the GPU as well
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(make_model(Path(folder)).cuda())
        engines = {
            backend: LLM(folder, skip_tokenizer_init=True, attention_backend=backend, **OPTIONS) for backend in BACKENDS
        }
        rows = [row(engines, length, args.rounds, reference) for length in PROMPT_LENGTHS]
    if args.results:
        write_results(args.results / f"engine-throughput-{gpu_slug()}.json", rows)


if __name__ == "__main__":
    main()
