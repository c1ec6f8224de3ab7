#!/usr/bin/env python3
"""Time the Triton sparse MLA kernel beside the native one of SM90, in one run.

    python benchmarks/sparse_mla.py --results benchmarks/results

Every shape is first compared with the float64 reference and with the native
kernel; a wrong result ends the run. Times are medians of CUDA graph replays,
per call, merge included. A graph holds enough calls on different index lists
to pass four times the L2 cache: decoding tokens own 131072 rows each, the
tokens of a prefill share them. Both kernels read the same rows.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.gpu.results import gpu_slug, write_results
from tests.kernels.overlay import load_overlay
from tests.kernels.reference import RANK, Inputs, sparse_mla_reference

kernels = load_overlay("vllm.v1.attention.ops.triton_mla_sparse")

ROPE = 64
NUM_TOPK = 2048
ROWS_PER_REQUEST = 131072
DECODE_TOKENS = [1, 8, 32, 64, 128]
PREFILL_TOKENS = [2048]
HEADS = [8, 16, 64]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
REPLAYS = 30


def make_inputs(kv: torch.Tensor, num_tokens: int, num_heads: int) -> list[Inputs]:
    """Return the arguments of the calls of one graph."""
    dtype = kv.dtype
    rows_read = min(num_tokens * NUM_TOPK, len(kv)) * (RANK + ROPE) * dtype.itemsize
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    num_requests = len(kv) // ROWS_PER_REQUEST
    inputs = []
    for _ in range(max(1, math.ceil(4 * l2 / rows_read))):
        topk = torch.stack(
            [
                torch.randperm(ROWS_PER_REQUEST, device="cuda", dtype=torch.int32)[:NUM_TOPK]
                + token % num_requests * ROWS_PER_REQUEST
                for token in range(num_tokens)
            ]
        )
        inputs.append(
            Inputs(
                q_nope=torch.randn(num_tokens, num_heads, RANK, dtype=dtype, device="cuda"),
                q_pe=torch.randn(num_tokens, num_heads, ROPE, dtype=dtype, device="cuda"),
                kv=kv,
                topk=topk,
                valid_count=torch.full((num_tokens,), NUM_TOPK, dtype=torch.int32, device="cuda"),
            )
        )
    return inputs


def triton_call(num_tokens: int, num_heads: int) -> Callable[[Inputs], torch.Tensor]:
    """Return a call of the Triton kernel as the backend makes it."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    num_head_blocks = -(-num_heads // kernels.get_config(num_heads).block_h)
    num_splits = kernels.get_num_splits(num_tokens, num_head_blocks, num_sms)
    workspace = [torch.empty(shape, device="cuda") for shape in kernels.get_workspace_shapes(num_heads, num_sms)]
    return lambda inputs: kernels.sparse_mla_attention(*inputs, num_splits=num_splits, workspace=workspace)[0]


def native_call(num_tokens: int) -> Callable[[Inputs], torch.Tensor]:
    """Return a call of FlashAttention 3 as FLASH_ATTN_MLA_SPARSE makes it."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    cu_seqlens_q = torch.arange(num_tokens + 1, dtype=torch.int32, device="cuda")
    return lambda inputs: flash_attn_varlen_func(
        q=inputs.q_pe,
        k=inputs.kv[:, RANK:].unsqueeze(1).unsqueeze(1),
        v=inputs.kv[:, :RANK].unsqueeze(1).unsqueeze(1),
        q_v=inputs.q_nope,
        max_seqlen_q=1,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_k=NUM_TOPK,
        seqused_k=inputs.valid_count,
        block_table=inputs.topk,
        softmax_scale=inputs.sm_scale,
        causal=True,
        fa_version=3,
    )


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()


def check(name: str, out: torch.Tensor, native: torch.Tensor, inputs: Inputs) -> float:
    """Return the error against the reference on the first tokens, or end the run."""
    few = slice(0, 32)
    subset = Inputs(inputs.q_nope[few], inputs.q_pe[few], inputs.kv, inputs.topk[few], inputs.valid_count[few])
    error = relative_error(out[few], sparse_mla_reference(subset)[0])
    tolerance = TOLERANCE[out.dtype]
    if error > tolerance or relative_error(out, native.double()) > 2 * tolerance:
        sys.exit(f"{name}: wrong result, relative L2 error {error:.2e}")
    return error


def graph_time(call: Callable[[Inputs], torch.Tensor], inputs: list[Inputs]) -> float:
    """Return the median time of one call in microseconds."""
    call(inputs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in inputs:
            call(each)
    times = []
    for replay in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 3:
            times.append(start.elapsed_time(end) * 1e3 / len(inputs))
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="folder to write the JSON file to")
    args = parser.parse_args()

    torch.manual_seed(0)
    rows = []
    for dtype in TOLERANCE:
        for num_tokens in DECODE_TOKENS + PREFILL_TOKENS:
            num_requests = num_tokens if num_tokens in DECODE_TOKENS else 1
            kv = torch.randn(num_requests * ROWS_PER_REQUEST, RANK + ROPE, dtype=dtype, device="cuda")
            for num_heads in HEADS:
                inputs = make_inputs(kv, num_tokens, num_heads)
                triton, native = triton_call(num_tokens, num_heads), native_call(num_tokens)
                name = f"{num_tokens} x {num_heads} {dtype}"
                error = check(name, triton(inputs[0]), native(inputs[0]), inputs[0])
                triton_us, native_us = graph_time(triton, inputs), graph_time(native, inputs)
                rows.append(
                    {
                        "tokens": num_tokens,
                        "heads": num_heads,
                        "dtype": str(dtype).removeprefix("torch."),
                        "triton_us": round(triton_us, 1),
                        "native_us": round(native_us, 1),
                        "ratio": round(triton_us / native_us, 3),
                        "relative_error": float(f"{error:.2e}"),
                    }
                )
                print(rows[-1], flush=True)
    if args.results:
        write_results(args.results / f"sparse-mla-{gpu_slug()}.json", rows)


if __name__ == "__main__":
    main()
