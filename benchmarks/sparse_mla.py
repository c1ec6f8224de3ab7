#!/usr/bin/env python3
"""Time the sparse MLA kernels on this GPU beside the native ones, the Triton peers and the floors of the hardware.

    python -m benchmarks.sparse_mla --results benchmarks/results
    python -m benchmarks.sparse_mla --tokens 1 8 --heads 8 --kv 16-bit --output part.json

Every result is compared with the float64 reference and with the native kernel before anything is timed. Times are
medians of CUDA graph replays, per call, with everything a call launches: docs/bench.md says how they are taken.
"""

import argparse
import json
import sys
import time
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks import occupancy, peers, timing, workload
from benchmarks.compiling import in_processes
from benchmarks.workload import (
    DTYPES,
    NUM_ROWS,
    NUM_TOPK,
    ROW_BYTES,
    TOLERANCE,
    Lists,
    Pool,
    Shape,
    relative_error,
)
from tests.gpu.results import gpu_slug, write_results
from tests.kernels.reference import Inputs, sparse_mla_reference

TOKENS = [1, 8, 32, 64, 128, 2048]
HEADS = [8, 16, 32, 64, 128]
QUICK = {"tokens": [1, 32, 2048], "heads": [8, 64], "dtype": ["bfloat16"]}
#: Largest relative L2 error of a peer; some round more often than ours.
PEER_TOLERANCE = 2e-2
#: GPUs whose configurations are run here beside this GPU's own.
OTHER_CAPABILITIES = [(12, 0), (8, 0)]


class WrongResultError(Exception):
    """A kernel gives something else than the reference."""


def check(name: str, out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """Return the relative L2 error."""
    error = relative_error(out, expected)
    if not error <= tolerance:  # NaN included
        raise WrongResultError(f"{name}: relative L2 error {error:.2e}, allowed {tolerance:.0e}")
    return error


def capabilities() -> list[tuple[int, int]]:
    """Return this GPU's compute capability, then those whose configurations are run as well."""
    own = torch.cuda.get_device_capability()
    return [own, *(other for other in OTHER_CAPABILITIES if other != own)]


def configure(shape: Shape, capability: tuple[int, int]) -> tuple[Any, int]:
    """Return the configuration that a GPU of `capability` uses, and the split count here."""
    from benchmarks.kernels import configs

    kv_format = configs.KVFormat(shape.kv)
    config = configs.get_config(shape.tokens, shape.heads, kv_format, capability, shape.is_prefill)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return config, configs.get_num_splits(shape.tokens, shape.heads, NUM_TOPK, config, num_sms)


def compile_shapes(task: tuple[str, str, int, list[int]]) -> str:
    """Launch once whatever `measure` will launch for a KV format, dtype and head count, on few rows and tokens."""
    from benchmarks.kernels import attend

    kv, dtype, heads, tokens = task
    pool = workload.make_pool(kv, DTYPES[dtype], 2 * NUM_TOPK)
    failures = []
    for shape in workload.shapes(tokens, [heads], [dtype], [kv]):
        few = Shape(min(shape.tokens, 32), heads, dtype, kv, shape.indices, shape.is_prefill)
        topk = torch.arange(NUM_TOPK, dtype=torch.int32, device="cuda").repeat(few.tokens, 1)
        (inputs,) = workload.make_inputs(few, pool, [topk])
        calls = [partial(attend, inputs, *configure(shape, one), shape.is_prefill) for one in capabilities()]
        for peer in peers.PEERS:
            try:
                call = peer.make_call(few, pool, inputs)
            except Exception:
                continue  # `measure` meets it again and says so
            if not isinstance(call, peers.Unavailable):
                calls.append(partial(call, peers.dense_inputs(inputs) if peer.dense else inputs))
        for call in calls:
            try:
                call()
                torch.cuda.synchronize()
            except Exception as error:
                failures.append(f"{shape}: {error}")
    return "; ".join(failures)


class Benchmark:
    """What the shapes of one run share: row lists, floors, earlier times, and why peers are missing."""

    def __init__(self) -> None:
        import triton

        self.triton = triton.__version__
        self.lists = Lists(torch.cuda.get_device_properties(0).L2_cache_size)
        self.memory_floors: dict[tuple[int, str, str], float] = {}
        self.times_16_bit: dict[tuple[Any, ...], float] = {}
        self.left_out: dict[str, set[str]] = {}
        self.failures: list[str] = []

    def header(self) -> dict[str, Any]:
        """Return what the rows of the result file have in common."""
        rates = {name: round(timing.matmul_rate(dtype) / 1e12, 1) for name, dtype in DTYPES.items()}
        return {
            "matmul_tflops": rates,
            "neighbour_overlap": self.lists.overlaps,
            "peers_left_out": peers.never_run()
            | {name: "; ".join(sorted(reasons)) for name, reasons in sorted(self.left_out.items())},
            "failures": self.failures,
        }

    def measure(self, shape: Shape, pool: Pool) -> list[dict[str, Any]]:
        """Return a row for this GPU's own configuration and for each of the other GPUs'."""
        from benchmarks.kernels import attend, attention, describe

        lists = self.lists.of(shape)
        inputs = workload.make_inputs(shape, pool, lists)
        tokens = workload.some_tokens(shape.tokens)
        expected = sparse_mla_reference(workload.only_tokens(inputs[0], tokens))[0]
        peer_times, witness = self._peers(shape, pool, inputs, tokens)
        natives = {peer.name: peer_times[peer.name] for peer in peers.PEERS if peer.native and peer.name in peer_times}
        native = min(natives, key=natives.__getitem__, default=None)
        floor, bound = self._floor(shape, pool, lists)

        rows: list[dict[str, Any]] = []
        for capability in capabilities():
            config, num_splits = configure(shape, capability)
            try:
                call = partial(attend, config=config, num_splits=num_splits, is_prefill=shape.is_prefill)
                out = call(inputs[0])
                error = check("sparse_mla_attention", out[tokens.to("cuda")], expected, TOLERANCE[shape.dtype])
                if witness is not None:
                    check("sparse_mla_attention against native", out, witness, 2 * TOLERANCE[shape.dtype])
                del out
                with occupancy.programs_as_on(capability, attention.attention_launcher(config).kernel):
                    us = timing.graph_time([partial(call, one) for one in inputs])
            except Exception as problem:
                self._fail(f"{shape} as on {capability}: {problem}")
                continue
            rows.append(
                self._row(shape, capability, us)
                | {
                    "native": native,
                    "native_us": round(natives[native], 2) if native else None,
                    "ratio": round(us / natives[native], 3) if native else None,
                    "floor_us": round(floor, 2),
                    "bound": bound,
                    "share_of_floor": round(floor / us, 3),
                    "relative_error": float(f"{error:.2e}"),
                    "config": describe(config, num_splits),
                    "triton": self.triton,
                }
            )
        if rows:
            rows[0]["peers"] = {name: round(us, 2) for name, us in peer_times.items()}
        return rows

    def _row(self, shape: Shape, capability: tuple[int, int], us: float) -> dict[str, Any]:
        """Return the first columns of a row, and what 16-bit rows say to an fp8 one."""
        row = {
            "tokens": shape.tokens,
            "heads": shape.heads,
            "dtype": shape.dtype,
            "kv": shape.kv,
            "topk": NUM_TOPK,
            "indices": shape.indices,
            "table": table_section(capability),
            "capability": "{}.{}".format(*capability),
            "us": round(us, 2),
        }
        key = shape.tokens, shape.heads, shape.dtype, shape.indices, capability
        if shape.kv == "16-bit":
            self.times_16_bit[key] = us
        elif key in self.times_16_bit:
            row["ratio_to_16bit"] = round(us / self.times_16_bit[key], 3)
        return row

    def _fail(self, problem: str) -> None:
        print(f"FAILED {problem}", flush=True)
        self.failures.append(problem)

    def _peers(
        self, shape: Shape, pool: Pool, inputs: list[Inputs], tokens: torch.Tensor
    ) -> tuple[dict[str, float], torch.Tensor | None]:
        """Return the times of the peers that serve this shape, and what a native one gives for the first call."""
        times: dict[str, float] = {}
        witness = None
        for peer in peers.PEERS:
            try:
                call = peer.make_call(shape, pool, inputs[0])
                if isinstance(call, peers.Unavailable):
                    self.left_out.setdefault(peer.name, set()).add(call.reason)
                    continue
                rows = peers.dense_rows(inputs[0]) if peer.dense else inputs[0]
                expected = sparse_mla_reference(workload.only_tokens(rows, tokens))[0]
                given = [peers.dense_inputs(one) for one in inputs] if peer.dense else inputs
                out = call(given[0])
                check(peer.name, out[tokens.to("cuda")], expected, PEER_TOLERANCE)
                if peer.native and witness is None:
                    witness = out.double()
                del out
                times[peer.name] = timing.graph_time([partial(call, one) for one in given])
            except Exception as error:  # not our kernel: it is left out, by name
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                print(f"{shape} without {peer.name}: {reason}", flush=True)
                self.left_out.setdefault(peer.name, set()).add(reason)
        return times, witness

    def _floor(self, shape: Shape, pool: Pool, lists: list[torch.Tensor]) -> tuple[float, str]:
        """Return the microseconds below which no kernel can be, and what sets them."""
        key = shape.tokens, shape.kv, shape.indices
        if key not in self.memory_floors:
            self.memory_floors[key] = timing.memory_floor(pool.rows, lists)
        memory = self.memory_floors[key]
        compute = timing.compute_floor(shape, timing.matmul_rate(DTYPES[shape.dtype]))
        return (memory, "memory") if memory >= compute else (compute, "compute")


def table_section(capability: tuple[int, int]) -> str:
    """Return the section of the configuration table that a GPU of `capability` uses."""
    from benchmarks.kernels import TABLE

    name = "{}.{}".format(*capability)
    return name if name in json.loads(TABLE.read_text()) else "default"


def summary(row: dict[str, Any]) -> str:
    """Return a row as a line of progress."""
    shape = f"{row['tokens']} x {row['heads']} {row['dtype']} {row['kv']} {row['indices']}"
    native = f", {row['ratio']:.2f} of {row['native']}" if row["native"] else ""
    return (
        f"{shape}, as on {row['capability']}: {row['us']} us{native}, "
        f"{row['share_of_floor']:.0%} of the {row['bound']} floor"
    )


def parse() -> tuple[argparse.Namespace, Path | None]:
    """Return the options and the file to write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", help=f"above 512 a prefill; default {TOKENS}")
    parser.add_argument("--heads", type=int, nargs="+", help=f"default {HEADS}")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="of the query and of a 16-bit KV cache")
    parser.add_argument("--kv", nargs="+", choices=ROW_BYTES, help="KV cache formats")
    parser.add_argument("--quick", action="store_true", help="a few shapes in bfloat16")
    parser.add_argument("--results", type=Path, help="folder for sparse-mla-<gpu>.json, of a run of all shapes only")
    parser.add_argument("--output", type=Path, help="file to write, of any run")
    args = parser.parse_args()
    is_partial = args.quick or any(value is not None for value in (args.tokens, args.heads, args.dtype, args.kv))
    if args.results and is_partial:
        parser.error("a run of some shapes would replace the results of all: write it with --output FILE")
    if args.results and args.output:
        parser.error("--results or --output, not both")
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA GPU here\ncure: run it on a machine with one (docs/bench.md)")
    quick = QUICK if args.quick else {}
    args.tokens = args.tokens or quick.get("tokens", TOKENS)
    args.heads = args.heads or quick.get("heads", HEADS)
    args.dtype = args.dtype or quick.get("dtype", list(DTYPES))
    args.kv = [kv for kv in ROW_BYTES if not args.kv or kv in args.kv]  # 16-bit first: fp8 is compared with it
    return args, args.results / f"sparse-mla-{gpu_slug()}.json" if args.results else args.output


def main() -> None:
    args, output = parse()
    start = time.monotonic()
    tasks = [(kv, dtype, heads, args.tokens) for kv in args.kv for dtype in args.dtype for heads in args.heads]
    print(f"compiling for {len(tasks)} combinations of KV format, dtype and head count", flush=True)
    try:
        for done, (task, failures) in enumerate(in_processes(compile_shapes, tasks), start=1):
            print(f"{done}/{len(tasks)} compiled: {task[:3]} {failures}", flush=True)
    except Exception as error:
        print(f"what is not compiled yet is compiled while timing: {error!r}", flush=True)
    print(f"{time.monotonic() - start:.0f} s; now timing", flush=True)

    torch.manual_seed(0)
    benchmark = Benchmark()
    rows: list[dict[str, Any]] = []
    # Rows are kept as they come, but take the place of earlier results only when all are there.
    unfinished = output.with_suffix(".partial.json") if output else None
    every = workload.shapes(args.tokens, args.heads, args.dtype, args.kv)
    for (kv, dtype), shapes in groupby(every, key=lambda shape: (shape.kv, shape.dtype)):
        pool = workload.make_pool(kv, DTYPES[dtype], NUM_ROWS)
        for shape in shapes:
            for row in benchmark.measure(shape, pool):
                rows.append(row)
                print(summary(row), flush=True)
            if unfinished:
                write_results(unfinished, rows, **benchmark.header())
        del pool  # before the next one is made
    print(f"{len(rows)} rows in {time.monotonic() - start:.0f} s", flush=True)
    if benchmark.failures:
        sys.exit("\n".join(["error: wrong or failing results, see above:", *benchmark.failures]))
    if unfinished and output:
        unfinished.replace(output)
        print(f"written: {output}", flush=True)


if __name__ == "__main__":
    main()
