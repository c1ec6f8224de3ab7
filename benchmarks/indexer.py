#!/usr/bin/env python3
"""Time the indexer's logits on this GPU beside DeepGEMM and the floors of the hardware.

    python -m benchmarks.indexer --results benchmarks/results
    python -m benchmarks.indexer --kind decode --batch 1 8 --heads 64 --output part.json

Logits of some tokens are compared with the float64 reference before anything is timed. Times are medians of CUDA graph
replays, per call. Rows of dtype "fp8 (software)" decode e4m3 to float16 first, as GPUs below SM89 have to: on a newer
GPU they show what that costs there, not how fast those GPUs are.

The floor is the larger of two times, both measured in this run. Decode: a kernel that only reads the very same pages,
and the operations divided by the rate of a large fp8 matrix product. Prefill: filling the logits, and the same
operations. Where e4m3 is decoded, it is the rate of a float16 product.
"""

import argparse
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import indexer_workload as workload
from benchmarks import timing
from benchmarks.compiling import in_processes
from benchmarks.indexer_workload import Decode, Pool, Prefill, Shape
from benchmarks.workload import relative_error
from tests.gpu.results import gpu_slug, write_results
from tests.kernels.mqa_reference import score

KINDS = ["prefill", "decode"]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128]
CONTEXTS = [8192, 32_768, 131_072]
HEADS = [32, 64]
QUICK = {"batch": [1, 32], "context": [8192, 131_072], "heads": [64]}
NATIVE, SOFTWARE = "fp8", "fp8 (software)"
#: Batches of a decode that are timed with e4m3 in software as well, where the GPU multiplies e4m3.
SOFTWARE_BATCHES = {1, 8, 32, 128}
TOLERANCE = 1e-3
#: DeepGEMM adds products in the matrix units' own precision.
PEER_TOLERANCE = 1e-2
#: What may be used of the free memory, and pages enough to compile with.
MEMORY_SHARE = 0.8
FEW_PAGES = 4096


class WrongResultError(Exception):
    """A kernel gives something else than the reference."""


def check(name: str, logits: torch.Tensor, expected: dict[int, torch.Tensor]) -> float:
    """Return the relative L2 error of some tokens' logits."""
    tolerance = PEER_TOLERANCE if name == "DeepGEMM" else TOLERANCE
    found = torch.cat([logits[token, : len(values)] for token, values in expected.items()])
    error = relative_error(found, torch.cat(list(expected.values())))
    if not error <= tolerance:  # NaN included
        raise WrongResultError(f"{name}: relative L2 error {error:.2e}, allowed {tolerance:.0e}")
    return error


def reference(inputs: Prefill | Decode, tokens: list[int]) -> dict[int, torch.Tensor]:
    """Return the float64 logits of some tokens, each [keys that it sees]."""
    q, found = inputs.q.flatten(0, -3), {}
    for token in tokens:
        own = slice(token, token + 1)
        found[token] = score(q[own], *inputs.keys(token), inputs.weights[own])[0]
    return found


def forms(shape: Shape) -> list[str]:
    """Return how e4m3 is treated in the rows of a shape."""
    if torch.cuda.get_device_capability() < (8, 9):
        return [SOFTWARE]
    in_software = shape.kind == "prefill" or (shape.next_n == 1 and shape.batch in SOFTWARE_BATCHES)
    return [NATIVE, SOFTWARE] if in_software else [NATIVE]


def make_inputs(shape: Shape, pool: Pool, calls: int | None = None) -> list[Prefill] | list[Decode]:
    if shape.kind == "prefill":
        return workload.make_prefill(shape, calls or workload.PREFILL_CALLS)
    return pool.make_decode(shape, calls)


def compile_shapes(shapes: list[Shape]) -> str:
    """Call once whatever `measure` will call for some shapes, on few pages; returns what failed."""
    from benchmarks import indexer_kernels as kernels

    pool = Pool(FEW_PAGES, l2_bytes=0)
    failures = []
    for shape in shapes:
        inputs = make_inputs(shape, pool, calls=1)
        makers = [lambda form=form: kernels.Triton(form == SOFTWARE) for form in forms(shape)]
        for make in [*makers, kernels.DeepGemm]:
            try:
                for call in kernels.calls(make(), inputs):
                    call()
                torch.cuda.synchronize()
            except Exception as error:  # `measure` meets it again and says so
                failures.append(f"{shape}: {(str(error).splitlines() or [repr(error)])[0]}")
    return "; ".join(dict.fromkeys(failures))


@cache
def fp8_rate() -> float:
    """Return the rate of a large e4m3 matrix product in FLOP/s."""
    size = timing.MATMUL_SIZE
    a, b = (workload.e4m3(size, size) for _ in range(2))
    one = torch.ones((), device="cuda")

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * size**3 / (timing.graph_time([multiply] * 4) * 1e-6)


def rate(form: str) -> float:
    return fp8_rate() if form == NATIVE else timing.matmul_rate(torch.float16)


class Benchmark:
    """What the shapes of one run share: pages, floors, schedules, and what is missing."""

    def __init__(self, shapes: list[Shape]) -> None:
        import triton

        self.triton = triton.__version__
        self.left_out: dict[str, set[str]] = {}
        self.shapes_left_out: dict[str, str] = {}
        self.failures: list[str] = []
        self.memory_floors: dict[tuple[str, int, int], float] = {}
        self.schedules: dict[tuple[int, int, int], dict[str, float]] = {}
        self.shapes = [shape for shape in shapes if self._fits(shape)]
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        pages = max([shape.pages for shape in self.shapes if shape.kind == "decode"], default=0)
        enough = 5 * l2_bytes // workload.PAGE_BYTES  # as many as the calls of a small shape read
        self.pool = Pool(max(pages, enough, FEW_PAGES), l2_bytes)

    def _fits(self, shape: Shape) -> bool:
        """Return whether a shape's memory is there: the cache, or the logits of three calls."""
        needed = shape.pages * workload.PAGE_BYTES
        if shape.kind == "prefill":
            needed = 3 * 4 * shape.batch * shape.context
        available = int(torch.cuda.mem_get_info()[0] * MEMORY_SHARE)
        if needed > available:
            text = f"needs {needed / 2**30:.1f} GiB, of which {available / 2**30:.1f} GiB may be used"
            self.shapes_left_out[str(shape)] = text
            print(f"{shape}: {text}", flush=True)
        return needed <= available

    def header(self) -> dict[str, Any]:
        """Return what the rows of the result file have in common."""
        used = dict.fromkeys(form for shape in self.shapes for form in forms(shape))
        return {
            "matmul_tflops": {form: round(rate(form) / 1e12, 1) for form in used},
            "peers_left_out": {name: "; ".join(sorted(reasons)) for name, reasons in sorted(self.left_out.items())},
            "shapes_left_out": self.shapes_left_out,
            "failures": self.failures,
        }

    def measure(self, shape: Shape) -> list[dict[str, Any]]:
        """Return a row for each way to treat e4m3."""
        from benchmarks import indexer_kernels as kernels

        inputs = make_inputs(shape, self.pool)
        expected = reference(inputs[0], workload.some_tokens(shape))
        peer_us, version = self._peer(shape, inputs, expected)
        rows = []
        for form in forms(shape):
            ours = kernels.Triton(form == SOFTWARE)
            try:
                us, error = self._time(ours, inputs, expected)
            except Exception as problem:
                print(f"FAILED {shape} {form}: {problem}", flush=True)
                self.failures.append(f"{shape} {form}: {problem}")
                continue
            floor, bound = self._floor(shape, form, inputs)
            rows.append({
                "kind": shape.kind,
                "batch": shape.batch,
                "context": shape.context,
                "heads": shape.heads,
                "next_n": shape.next_n,
                "dtype": form,
                "us": round(us, 2),
                "deepgemm": version,
                "deepgemm_us": round(peer_us, 2) if peer_us else None,
                "ratio": round(us / peer_us, 3) if peer_us else None,
                "floor_us": round(floor, 2),
                "bound": bound,
                "share_of_floor": round(floor / us, 3),
                "relative_error": float(f"{error:.2e}"),
                "config": ours.describe(inputs[0]),
                "triton": self.triton,
            })  # fmt: skip
        if rows and shape.kind == "decode":
            rows[0] |= self._schedule(shape, inputs[0])
        return rows

    def _time(
        self, kernels: Any, inputs: list[Prefill] | list[Decode], expected: dict[int, torch.Tensor]
    ) -> tuple[float, float]:
        """Return the microseconds of a call and its relative error, which comes first."""
        from benchmarks.indexer_kernels import calls

        made = calls(kernels, inputs)
        error = check(kernels.name, made[0](), expected)
        return timing.graph_time(made), error

    def _peer(
        self, shape: Shape, inputs: list[Prefill] | list[Decode], expected: dict[int, torch.Tensor]
    ) -> tuple[float | None, str | None]:
        """Return the time of DeepGEMM and its version, or nothing and why."""
        from benchmarks.indexer_kernels import DeepGemm

        try:
            peer = DeepGemm()
            return self._time(peer, inputs, expected)[0], peer.version
        except Exception as error:  # not our kernel: it is left out, by name
            self._leave_out(f"DeepGEMM {shape.kind}", error)
            return None, None

    def _leave_out(self, name: str, error: Exception) -> None:
        reason = (str(error).splitlines() or [repr(error)])[0]
        if reason not in self.left_out.setdefault(name, set()):
            print(f"without {name}: {reason}", flush=True)
            self.left_out[name].add(reason)

    def _schedule(self, shape: Shape, inputs: Decode) -> dict[str, float]:
        """Return the microseconds of sharing out the pages, once a step for all layers."""
        from benchmarks import indexer_kernels as kernels

        key = shape.batch, shape.context, shape.next_n
        if key not in self.schedules:
            times = self.schedules[key] = {}
            makers = {"schedule_us": lambda: kernels.Triton(False), "deepgemm_schedule_us": kernels.DeepGemm}
            for name, make in makers.items():
                try:
                    schedule = partial(make().schedule, inputs)
                    times[name] = round(timing.graph_time([schedule] * 20, budget_ms=5.0), 2)
                except Exception as error:
                    self._leave_out(name.removesuffix("_us"), error)
        return self.schedules[key]

    def _floor(self, shape: Shape, form: str, inputs: list[Prefill] | list[Decode]) -> tuple[float, str]:
        """Return the microseconds below which no kernel can be, and what sets them."""
        key = shape.kind, shape.batch, shape.context
        if key not in self.memory_floors:
            if shape.kind == "prefill":
                logits = torch.empty(shape.batch, shape.context, device="cuda")
                self.memory_floors[key] = timing.graph_time([lambda: logits.fill_(1.0)] * 4)
            else:
                self.memory_floors[key] = timing.memory_floor(*workload.pieces(inputs))
        memory, compute = self.memory_floors[key], shape.flop / rate(form) * 1e6
        return (memory, "memory") if memory >= compute else (compute, "compute")


def summary(row: dict[str, Any]) -> str:
    """Return a row as a line of progress."""
    peer = f", {row['ratio']:.2f} of DeepGEMM" if row["ratio"] else ""
    drafts = f" x {row['next_n']}" if row["next_n"] > 1 else ""
    return (
        f"{row['kind']} {row['batch']}{drafts} x {row['context']}, {row['heads']} heads, {row['dtype']}: {row['us']} us"
        f"{peer}, {row['share_of_floor']:.0%} of the {row['bound']} floor"
    )


def parse() -> tuple[argparse.Namespace, Path | None]:
    """Return the options and the file to write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", nargs="+", choices=KINDS)
    parser.add_argument("--batch", type=int, nargs="+", help=f"requests of a decode; default {BATCHES}")
    parser.add_argument("--context", type=int, nargs="+", help=f"a multiple of {workload.PAGE}; default {CONTEXTS}")
    parser.add_argument("--heads", type=int, nargs="+", help=f"default {HEADS}")
    parser.add_argument("--quick", action="store_true", help="a few shapes")
    parser.add_argument("--results", type=Path, help="folder for indexer-<gpu>.json, of a run of all shapes only")
    parser.add_argument("--output", type=Path, help="file to write, of any run")
    args = parser.parse_args()
    is_partial = args.quick or any(value is not None for value in (args.kind, args.batch, args.context, args.heads))
    if args.results and is_partial:
        parser.error("a run of some shapes would replace the results of all: write it with --output FILE")
    if args.results and args.output:
        parser.error("--results or --output, not both")
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA GPU here\ncure: run it on a machine with one (docs/bench.md)")
    quick = QUICK if args.quick else {}
    args.kind = args.kind or KINDS
    args.batch = args.batch or quick.get("batch", BATCHES)
    args.context = args.context or quick.get("context", CONTEXTS)
    args.heads = args.heads or quick.get("heads", HEADS)
    if any(context % workload.PAGE for context in args.context):
        parser.error(f"--context takes multiples of {workload.PAGE}")
    return args, args.results / f"indexer-{gpu_slug()}.json" if args.results else args.output


def compile_all(shapes: list[Shape]) -> None:
    """Compile what the shapes need, those of a kernel in a process of their own."""
    groups: dict[tuple[str, int, int], list[Shape]] = {}
    for shape in shapes:
        groups.setdefault((shape.kind, shape.heads, shape.next_n), []).append(shape)
    print(f"compiling for {len(groups)} combinations of kind, heads and draft tokens", flush=True)
    try:
        for done, (group, failures) in enumerate(in_processes(compile_shapes, groups.values()), start=1):
            print(f"{done}/{len(groups)} compiled: {group[0]} and its like {failures}", flush=True)
    except Exception as error:
        print(f"what is not compiled yet is compiled while timing: {error!r}", flush=True)


def main() -> None:
    args, output = parse()
    start = time.monotonic()
    torch.manual_seed(0)
    benchmark = Benchmark(list(workload.shapes(args.kind, args.batch, args.context, args.heads)))
    compile_all(benchmark.shapes)
    print(f"{time.monotonic() - start:.0f} s; now timing", flush=True)
    rows: list[dict[str, Any]] = []
    # Rows are kept as they come, but take the place of earlier results only when all are there.
    unfinished = output.with_suffix(".partial.json") if output else None
    for shape in benchmark.shapes:
        for row in benchmark.measure(shape):
            rows.append(row)
            print(summary(row), flush=True)
        if unfinished:
            write_results(unfinished, rows, **benchmark.header())
    print(f"{len(rows)} rows in {time.monotonic() - start:.0f} s", flush=True)
    if benchmark.failures:
        sys.exit("\n".join(["error: wrong or failing results, see above:", *benchmark.failures]))
    if unfinished and output:
        unfinished.replace(output)
        print(f"written: {output}", flush=True)


if __name__ == "__main__":
    main()
