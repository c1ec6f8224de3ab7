#!/usr/bin/env python3
"""Find the fastest configurations of the sparse MLA kernel on this GPU and write them to the kernel's table.

    python -m benchmarks.tune                    # the rows of this GPU's compute capability
    python -m benchmarks.tune --table default    # the rows of all GPUs without rows of their own: they fit 99 KB

Every candidate is compiled and compared with the float64 reference first, in all processor cores. Then each head and
token count is timed as benchmarks/sparse_mla.py does it, coarsely, and the best ones again. docs/bench.md says more.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from typing import Any

import torch

from benchmarks import occupancy, timing, workload
from benchmarks.compiling import in_processes
from benchmarks.config_table import FORMATS, KINDS, Candidate, Cell, choose, merge, render, with_rows, write
from benchmarks.workload import DTYPES, NUM_ROWS, NUM_TOPK, TOLERANCE, Lists, Pool, Shape, relative_error
from tests.kernels.compilation import resource_usage
from tests.kernels.reference import Inputs, sparse_mla_reference

HEADS = [8, 16, 32, 64]
TOKENS = {"decode": [1, 8, 32, 128, 512], "prefill": [2048]}
#: Tokens of the short prefill that counts for the rows as well.
SHORT_PREFILL = 512
#: KV rows per iteration, warps, stages; and registers per thread, where a limit lets more programs run on an SM.
TILES = {
    "16-bit": [(32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 4, 3), (32, 8, 2), (64, 8, 2), (32, 4, 2, 128)],
    "fp8": [(32, 4, 2), (32, 4, 3), (64, 4, 2), (32, 8, 2), (64, 8, 2), (64, 8, 3), (32, 4, 2, 168)],
}
#: The same of the kernels in Gluon, of which `mma` takes 8 or 16 rows of the query. SM90's takes 64 KV rows at a time;
#: with 128 registers an SM runs two programs of 8 warps. There fp8 rows wait in registers.
MMA_TILES = {
    "16-bit": [(16, 4, 1), (16, 4, 2), (32, 4, 1), (32, 4, 2)],
    "fp8": [
        *((16, 4, 1), (16, 4, 2), (32, 4, 1), (32, 4, 2)),
        *((16, 4, 1, 168), (16, 4, 2, 168), (32, 4, 1, 168), (16, 4, 1, 128), (16, 4, 2, 128)),
    ],
}
WGMMA_TILES = {
    "16-bit": [(64, 4, 1), (64, 4, 2), (64, 8, 2), (64, 8, 1, 128)],
    "fp8": [(64, 4, 1), (64, 8, 1), (64, 8, 1, 128)],
}
#: Rows of the query tile and tokens per program, by head count.
QUERY_TILES = {
    "decode": {
        8: [(8, 1), (16, 1)],
        16: [(16, 1)],
        32: [(16, 1), (32, 1)],
        64: [(16, 1), (32, 1), (64, 1)],
    },
    "prefill": {
        8: [(8, 1), (16, 1), (16, 2)],
        16: [(16, 1), (32, 2)],
        32: [(16, 1), (32, 1), (64, 2)],
        64: [(16, 1), (32, 1), (64, 1)],
    },
}
PROGRAMS_PER_SM = [1, 2, 3, 4]
#: What a candidate is timed with first, and how much slower than the best it may be to be timed again.
COARSE_PROGRAMS_PER_SM = 2
COARSE_REPLAYS, FINE_REPLAYS = 3, 15
FINALISTS = 4
FINALIST_SLOWDOWN = 1.15
#: Query dtypes and KV formats of a format of the table. The first is timed; all must work.
VARIANTS = {
    "16-bit": [("bfloat16", "16-bit"), ("float16", "16-bit")],
    "fp8": [(dtype, kv) for kv in ("fp8_ds_mla", "fp8_e4m3") for dtype in DTYPES],
}
#: The shared memory that a program may have on SM86, SM89, SM120 and SM121, in bytes.
SMALL_SHARED = 101_376
#: Those whose instructions and assembler differ.
SMALL_ARCHS = (89, 120)
#: The default rows are those of SM120; from 64 rows on, SM90 would run them on instructions that SM120 lacks.
DEFAULT_CAPABILITY = (12, 0)
DEFAULT_MAX_BLOCK_H = 32


def kernels_for(kv_format: str, kind: str, heads: int, *, is_default: bool, is_sm90: bool = False) -> list[Candidate]:
    """Return the kernels to try for a head count, without those that spill for certain."""
    own_sm90 = is_sm90 and not is_default

    def fits(block_h: int, tile: tuple[int, ...], gluon: str) -> bool:
        if gluon == "mma":
            return block_h in (8, 16)
        if gluon == "wgmma":
            # Four warps hold the accumulators of 32 rows of the query, eight of 128 registers as well.
            return block_h in ((16, 32, 64) if tile[1:] in ((8, 1), (8, 2)) else (16, 32))
        # There are 512 accumulators a row, so four warps do not hold 32 rows.
        return block_h <= (16 if tile[1] == 4 else DEFAULT_MAX_BLOCK_H if is_default else 128)

    query_tiles = QUERY_TILES[kind][heads]
    if is_default and any(group > 1 and block_h <= 16 for block_h, group in query_tiles):
        # Those of these GPUs that have no native backend read memory at less than half the H200's rate: what neighbours
        # share is read once, even where the H200 gains nothing by it.
        query_tiles = [(block_h, group) for block_h, group in query_tiles if group > 1]
    kernels = {"": TILES}
    if own_sm90:
        kernels["wgmma"] = WGMMA_TILES
    if not own_sm90 or kv_format == "fp8":  # of 16 bits, SM90's own instructions were never slower
        kernels["mma"] = MMA_TILES
    return [
        Candidate(block_h, *tile[:3], programs_per_sm=0, group=group, gluon=gluon, maxnreg=(*tile, 0)[3])
        for gluon, tiles in kernels.items()
        for tile in tiles[kv_format]
        for block_h, group in query_tiles
        if fits(block_h, tile, gluon)
    ]


@dataclass(frozen=True)
class Trial:
    """A kernel to compile and to compare with the reference."""

    kernel: Candidate
    kv_format: str  # of the table
    variants: tuple[tuple[str, str], ...]  # query dtype, KV format
    capability: tuple[int, int]
    max_shared: int | None  # bytes; with it, spilling is refused as well


def make_config(candidate: Candidate, kv_format: str, capability: tuple[int, int]) -> Any:
    """Return the kernel's configuration; what is not tuned is what the table gives."""
    from benchmarks.kernels import configs

    any_format = configs.KVFormat.MODEL if kv_format == "16-bit" else configs.KVFormat.FP8_DS_MLA
    fields = asdict(candidate) | {"maxnreg": candidate.maxnreg or None}
    return replace(configs.get_config(1, 8, any_format, capability), **fields)


@dataclass(frozen=True)
class Outcome:
    """Why a kernel cannot be used, or nothing; and its shared memory, in bytes."""

    reason: str
    shared: int = 0


def try_kernel(trial: Trial) -> Outcome:
    """Compile and launch a kernel. Runs in a process of its own."""
    import triton

    from benchmarks.kernels import attention

    candidate = replace(trial.kernel, programs_per_sm=COARSE_PROGRAMS_PER_SM)
    config = make_config(candidate, trial.kv_format, trial.capability)
    kernel = attention.attention_launcher(config).kernel
    compiled: list[tuple[Any, dict[str, Any]]] = []

    def listen(*, src: Any, metadata: dict[str, Any], **_: Any) -> None:
        if src.fn is kernel:
            compiled.append((src, metadata))

    triton.knobs.compilation.listener = listen
    try:
        if not trial.max_shared:
            reason = wrong_result(trial, config)
            return Outcome(reason, max((metadata["shared"] for _, metadata in compiled), default=0))
        reason = wrong_result(trial, replace(config, launch_pdl=False))  # which SM89 has not
        triton.knobs.compilation.listener = None
        shared = 0
        for source, metadata in compiled:
            spilled, needed = small_gpu_usage(source, metadata)
            shared = max(shared, needed)
            if spilled:
                reason = reason or f"{spilled} bytes of spilled registers"
        if shared > trial.max_shared:
            reason = reason or f"{shared} bytes of shared memory"
        return Outcome(reason, shared)
    except Exception as problem:
        return Outcome(f"{type(problem).__name__}: {(str(problem).strip().splitlines() or [''])[-1]}")
    finally:
        triton.knobs.compilation.listener = None


def wrong_result(trial: Trial, config: Any) -> str:
    """Launch every variant, split and not; return which one is wrong, or nothing."""
    from benchmarks.kernels import attend

    tokens = 2 * config.group
    for dtype, kv in trial.variants:
        pool = workload.make_pool(kv, DTYPES[dtype], 2 * NUM_TOPK)
        topk = torch.stack([torch.randperm(2 * NUM_TOPK, device="cuda")[:NUM_TOPK] for _ in range(tokens)]).int()
        shape = Shape(tokens, config.block_h // config.group, dtype, kv)
        (inputs,) = workload.make_inputs(shape, pool, [topk])
        expected = sparse_mla_reference(inputs)[0]
        for num_splits in (1, 2):
            error = relative_error(attend(inputs, config, num_splits, is_prefill=False), expected)
            if not error <= TOLERANCE[dtype]:  # NaN included
                return f"wrong result for {dtype} {kv}, {num_splits} splits: error {error:.1e}"
    return ""


def small_gpu_usage(source: Any, metadata: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of spilled registers per thread and of shared memory of a kernel compiled for small GPUs."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {name: metadata[name] for name in ("num_warps", "num_stages", "maxnreg")}
    usage = []
    for arch in SMALL_ARCHS:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        _, spilled = resource_usage(compiled.asm["cubin"])
        usage.append((spilled, compiled.metadata.shared))
    most_spilled, most_shared = map(max, zip(*usage, strict=True))
    return most_spilled, most_shared


def fitting(trials: Sequence[Trial], sm_shared: int) -> dict[Candidate, int]:
    """Return the kernels that can be used, with how many programs an SM may run, and say why the others cannot.

    `sm_shared` is the shared memory of an SM, in bytes. Programs beyond it would wait for the first to end.
    """
    usable = {}
    for done, (trial, outcome) in enumerate(in_processes(try_kernel, trials), start=1):
        print(f"{done}/{len(trials)} {trial.kernel}: {outcome.reason or 'ok'}", flush=True)
        if not outcome.reason:
            usable[trial.kernel] = occupancy.programs_per_sm(outcome.shared, sm_shared)
    return usable


class Tuner:
    """Times candidates on the GPU."""

    def __init__(self, kv_format: str, capability: tuple[int, int]) -> None:
        self.kv_format = kv_format
        self.capability = capability
        self.dtype, self.kv = VARIANTS[kv_format][0]
        properties = torch.cuda.get_device_properties(0)
        self.num_sms = properties.multi_processor_count
        self.lists = Lists(properties.L2_cache_size)
        self.pool: Pool = workload.make_pool(self.kv, DTYPES[self.dtype], NUM_ROWS)

    def shapes(self, kind: str, cell: Cell) -> list[Shape]:
        """Return what is timed for a cell: a prefill also when it is short, with random and with shared rows."""
        heads, tokens = cell
        if kind == "decode":
            return [Shape(tokens, heads, self.dtype, self.kv)]
        return [
            Shape(count, heads, self.dtype, self.kv, indices, is_prefill=True)
            for count in sorted({min(SHORT_PREFILL, tokens), tokens})
            for indices in ("random", "overlap")
        ]

    def time_cell(self, kind: str, cell: Cell, kernels: dict[Candidate, int]) -> dict[Candidate, float]:
        """Return microseconds per call of the best candidates, the geometric mean over the cell's shapes.

        `kernels` says how many programs of each an SM may run.
        """
        runs = [
            Run(shape, workload.make_inputs(shape, self.pool, self.lists.of(shape)), self.capability)
            for shape in self.shapes(kind, cell)
        ]

        def splits(candidate: Candidate) -> tuple[int, ...]:
            return tuple(self._num_splits(candidate, run.shape) for run in runs)

        def measure(candidate: Candidate, replays: int) -> float:
            config = make_config(candidate, self.kv_format, self.capability)
            times = [run.time(config, count, replays) for run, count in zip(runs, splits(candidate), strict=True)]
            return math.exp(sum(map(math.log, times)) / len(times))

        coarse = {}
        for kernel in kernels:
            try:
                programs = min(COARSE_PROGRAMS_PER_SM, kernels[kernel])
                coarse[kernel] = measure(replace(kernel, programs_per_sm=programs), COARSE_REPLAYS)
            except RuntimeError as problem:
                print(f"{cell} {kernel}: {problem}", flush=True)
        ranked = sorted(coarse, key=coarse.__getitem__)
        finalists = [one for one in ranked[:FINALISTS] if coarse[one] <= FINALIST_SLOWDOWN * coarse[ranked[0]]]
        fine: dict[Candidate, float] = {}
        for kernel in finalists:
            measured: dict[tuple[int, ...], float] = {}  # the number of programs matters only through the splits
            for programs in PROGRAMS_PER_SM[: kernels[kernel]]:
                candidate = replace(kernel, programs_per_sm=programs)
                key = splits(candidate)
                if key not in measured:
                    measured[key] = measure(candidate, FINE_REPLAYS)
                fine[candidate] = measured[key]
        return fine

    def _num_splits(self, candidate: Candidate, shape: Shape) -> int:
        from benchmarks.kernels import configs

        config = make_config(candidate, self.kv_format, self.capability)
        return configs.get_num_splits(shape.tokens, shape.heads, NUM_TOPK, config, self.num_sms)


class Run:
    """One shape with its inputs and what is right for them, on a GPU like one of `capability`."""

    def __init__(self, shape: Shape, inputs: list[Inputs], capability: tuple[int, int]) -> None:
        self.shape = shape
        self.capability = capability
        self.inputs = inputs
        tokens = workload.some_tokens(shape.tokens)
        self.tokens = tokens.to(inputs[0].topk.device)
        self.expected = sparse_mla_reference(workload.only_tokens(inputs[0], tokens))[0]

    def time(self, config: Any, num_splits: int, replays: int) -> float:
        """Return microseconds per call.

        Raises:
            RuntimeError: the result is wrong, or the launch fails.

        """
        from benchmarks.kernels import attend, attention

        call = partial(attend, config=config, num_splits=num_splits, is_prefill=self.shape.is_prefill)
        error = relative_error(call(self.inputs[0])[self.tokens], self.expected)
        if not error <= TOLERANCE[self.shape.dtype]:
            raise RuntimeError(f"wrong result, error {error:.1e}")
        with occupancy.programs_as_on(self.capability, attention.attention_launcher(config).kernel):
            return timing.graph_time([partial(call, one) for one in self.inputs], replays=replays)


def tune_format(kv_format: str, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each kind for one format of the table."""
    start = time.monotonic()
    is_default = args.table == "default"
    capability = DEFAULT_CAPABILITY if is_default else torch.cuda.get_device_capability()
    is_sm90 = capability[0] == 9
    wanted = {
        (kind, heads): kernels_for(kv_format, kind, heads, is_default=is_default, is_sm90=is_sm90)
        for kind in args.kind
        for heads in args.heads
    }
    kernels = sorted({kernel for several in wanted.values() for kernel in several})

    def trial(kernel: Candidate, variants: list[tuple[str, str]]) -> Trial:
        return Trial(kernel, kv_format, tuple(variants), capability, args.max_shared)

    print(f"{kv_format}: compiling and checking {len(kernels)} kernels", flush=True)
    own_sm_shared = torch.cuda.get_device_properties(0).shared_memory_per_multiprocessor
    sm_shared = occupancy.SM_SHARED.get(capability, own_sm_shared)
    usable = fitting([trial(kernel, VARIANTS[kv_format][:1]) for kernel in kernels], sm_shared)
    print(f"{kv_format}: {len(usable)} of {len(kernels)} after {time.monotonic() - start:.0f} s; timing", flush=True)

    tuner = Tuner(kv_format, capability)
    times: dict[str, dict[Cell, dict[Candidate, float]]] = {kind: {} for kind in args.kind}
    left_out = []
    for kind in args.kind:
        for heads in args.heads:
            for tokens in args.tokens or TOKENS[kind]:
                if time.monotonic() - start > args.budget_s:
                    left_out.append(f"{kind} {tokens} x {heads}")
                    continue
                allowed = {one: usable[one] for one in wanted[kind, heads] if one in usable}
                measured = tuner.time_cell(kind, (heads, tokens), allowed)
                times[kind][heads, tokens] = measured
                best = min(measured, key=measured.__getitem__, default=None)
                found = f"{measured[best]:.1f} us, {best}" if best else "nothing fits"
                print(f"{kv_format} {kind} {tokens} x {heads}: {found}", flush=True)
    if left_out:
        print(f"the budget of {args.budget_s} s left no time for: {', '.join(left_out)}", flush=True)
    del tuner

    # The chosen ones must serve every query dtype and KV format; what does not gives way to the next.
    refused: set[Candidate] = set()
    proven: set[Candidate] = set()
    while True:
        chosen = {}
        for kind in args.kind:
            left = {
                cell: {one: us for one, us in measured.items() if one.kernel not in refused}
                for cell, measured in times[kind].items()
            }
            chosen[kind] = choose(left, args.tolerance)
        unproven = {one.kernel for kind in args.kind for one in chosen[kind].values()} - proven
        if not unproven:
            break
        passed = set(fitting([trial(kernel, VARIANTS[kv_format]) for kernel in sorted(unproven)], sm_shared))
        proven |= passed
        refused |= unproven - passed
    print(f"{kv_format}: {len(proven)} kernels after {time.monotonic() - start:.0f} s", flush=True)
    return {kind: merge(chosen[kind]) for kind in args.kind}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", choices=["default"], help="rows for GPUs without rows of their own")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--heads", type=int, nargs="+", choices=HEADS, help="some head counts; with --dry-run")
    parser.add_argument("--tokens", type=int, nargs="+", help="other token counts; with --dry-run")
    parser.add_argument("--max-shared", type=int, help=f"bytes of shared memory, and no spills; default {SMALL_SHARED}")
    parser.add_argument(
        "--budget-s", type=float, default=210, help="time for one format, after which cells are left out"
    )
    parser.add_argument("--tolerance", type=float, default=0.02, help="how much slower fewer kernels may be")
    parser.add_argument("--dry-run", action="store_true", help="print the rows and leave the table alone")
    args = parser.parse_args()
    if (args.heads or args.tokens) and not args.dry_run:
        parser.error("rows for some head or token counts would replace those for all: add --dry-run")
    args.heads = sorted(args.heads or HEADS)
    if args.table == "default" and args.max_shared is None:
        args.max_shared = SMALL_SHARED
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA GPU here\ncure: run it on the GPU that the rows are for (docs/bench.md)")
    return args


def main() -> None:
    args = parse()
    import triton

    from benchmarks.kernels import TABLE

    torch.manual_seed(0)
    section = args.table or "{}.{}".format(*torch.cuda.get_device_capability())
    tuned = {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__, "date": date.today().isoformat()}
    if args.max_shared:
        tuned["max_shared"] = args.max_shared
    for kv_format in args.format:
        rows = tune_format(kv_format, args)
        table = json.loads(TABLE.read_text())
        for kind in args.kind:
            if not rows[kind]:
                sys.exit(f"error: nothing was measured for {kv_format} {kind}\ncure: a larger --budget-s")
            table = with_rows(table, section, kv_format, kind, rows[kind], tuned)
        if args.dry_run:
            print(render({section: table[section]}), end="")
        else:
            write(TABLE, table)
            print(f"written: {kv_format} of {section} in {TABLE}", flush=True)


if __name__ == "__main__":
    main()
