"""The tuner, as far as it needs no GPU."""

import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from benchmarks import tune
from benchmarks.config_table import FORMATS, KINDS
from tests.kernels.overlay import OVERLAY

ROOT = OVERLAY.parent


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", tune.HEADS)
def test_every_cell_has_candidates_that_default_rows_may_use(kv_format: str, kind: str, heads: int) -> None:
    kernels = tune.kernels_for(kv_format, kind, heads, is_default=True)
    assert len(kernels) == len(set(kernels)) >= 4
    assert all(kernel.block_h <= 32 for kernel in kernels)
    assert all(kernel.block_h // kernel.group >= 8 for kernel in kernels), "a head block of the smallest tile"
    assert kind == "prefill" or all(kernel.group == 1 for kernel in kernels), "decoding tokens share no rows"
    if (kind, heads) == ("prefill", 8):
        assert all(kernel.group == 2 for kernel in kernels), "memory is slow there: shared rows are read once"


@pytest.mark.parametrize("kv_format", FORMATS)
def test_wgmma_on_sm90_only(kv_format: str) -> None:
    def gluon(**options: bool) -> set[str]:
        return {kernel.gluon for kernel in tune.kernels_for(kv_format, "decode", 8, **options)}

    assert gluon(is_default=False, is_sm90=True) == {"", "wgmma"} | ({"mma"} if kv_format == "fp8" else set())
    assert gluon(is_default=True, is_sm90=True) == {"", "mma"}
    assert gluon(is_default=False) == {"", "mma"}


def test_first_variant_is_the_timed_one_and_all_formats_are_tried() -> None:
    assert tune.VARIANTS["16-bit"][0] == ("bfloat16", "16-bit")
    assert set(tune.VARIANTS["fp8"]) == {
        (dtype, kv) for dtype in ("bfloat16", "float16") for kv in ("fp8_ds_mla", "fp8_e4m3")
    }


def usage_on_sm89() -> tuple[int, int]:
    """Compile a kernel for another GPU and return what it uses where memory is small."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.timing import gather_kernel

    seen = []
    triton.knobs.compilation.listener = lambda *, src, metadata, **_: seen.append((src, metadata))
    names = gather_kernel.arg_names
    pointers = dict.fromkeys(("kv_ptr", "topk_ptr", "out_ptr"), "*i32")
    signature = {name: pointers.get(name, "i32") for name in names[:4]} | dict.fromkeys(names[4:], "constexpr")
    source = ASTSource(gather_kernel, signature, {(4,): 288, (5,): 64}, {(0,): [["tt.divisibility", 16]]})
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    triton.knobs.compilation.listener = None
    ((source, metadata),) = seen
    assert source.fn is gather_kernel
    return tune.small_gpu_usage(source, metadata)


def test_a_kernel_is_compiled_again_for_the_gpus_with_small_memory(compiler):
    spilled, shared = compiler.submit(usage_on_sm89).result()
    assert spilled == 0
    assert 0 < shared <= tune.SMALL_SHARED


def test_registers_that_spill_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=4), asm={"cubin": b""})
    monkeypatch.setattr(triton, "compile", lambda *_, **__: compiled)
    metadata = {"num_warps": 4, "num_stages": 2, "maxnreg": None}
    for stacks, local in [((0, 0), 0), ((16, 0), 0), ((0, 24), 0), ((0, 0), 8)]:  # with each of two assemblers
        outputs = [f"Function f: REG:255 STACK:{stack} SHARED:0 LOCAL:{local} TEXTURE:0" for stack in stacks]
        monkeypatch.setattr(subprocess, "run", Mock(side_effect=[SimpleNamespace(stdout=one) for one in outputs]))
        assert tune.small_gpu_usage(None, metadata) == (max(stacks) + local, 4)


@pytest.mark.parametrize(("sm_shared", "fits"), [(102_400, [4, 1, 2]), (233_472, [9, 2, 5])])
def test_an_sm_runs_as_many_programs_as_its_shared_memory_holds(
    monkeypatch: pytest.MonkeyPatch, sm_shared: int, fits: list[int]
) -> None:
    def outcomes(function, trials):
        usage = [("", 24_000), ("", 90_000), ("", 40_000), ("too large", 200_000)]
        return [(trial, tune.Outcome(*each)) for trial, each in zip(trials, usage, strict=True)]

    monkeypatch.setattr(tune, "in_processes", outcomes)
    kernels = tune.kernels_for("16-bit", "decode", 8, is_default=True)[:4]
    trials = [tune.Trial(kernel, "16-bit", (), (12, 0), None) for kernel in kernels]
    assert list(tune.fitting(trials, sm_shared).values()) == fits


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.tune", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_some_cells_do_not_replace_the_rows_of_all() -> None:
    result = run("--heads", "8")
    assert result.returncode == 2
    assert "--dry-run" in result.stderr


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tune"])
    with pytest.raises(SystemExit, match=r"no CUDA GPU here\ncure: "):
        tune.main()


@pytest.mark.parametrize(("table", "shared"), [([], None), (["--table", "default"], tune.SMALL_SHARED)])
def test_default_rows_fit_small_shared_memory(monkeypatch: pytest.MonkeyPatch, table: list[str], shared: int) -> None:
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["tune", *table])
    assert tune.parse().max_shared == shared


def test_a_prefill_is_timed_long_and_short_with_random_and_shared_rows() -> None:
    tuner = object.__new__(tune.Tuner)
    tuner.dtype, tuner.kv = tune.VARIANTS["fp8"][0]
    shapes = tuner.shapes("prefill", (8, 2048))
    assert {(shape.tokens, shape.indices) for shape in shapes} == {
        (tokens, indices) for tokens in (512, 2048) for indices in ("random", "overlap")
    }
    assert all(shape.is_prefill and shape.kv == "fp8_ds_mla" for shape in shapes)
    (shape,) = tuner.shapes("decode", (8, 512))
    assert (shape.tokens, shape.is_prefill) == (512, False)
