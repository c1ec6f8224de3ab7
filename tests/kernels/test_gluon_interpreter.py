"""The interpreter of Gluon's kernels: what it is stricter in than a GPU."""

from pathlib import Path

import pytest
import torch

KERNEL = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

COUNT = gl.constexpr(4)


@gluon.jit
def _offsets(first):
    return first + gl.arange(0, COUNT, layout=None)


@gluon.jit(do_not_specialize=["count"])
def copy_kernel(from_ptr, to_ptr, count, WAIT: gl.constexpr):
    offs = _offsets(gl.program_id(0) * COUNT)
    shared = gl.allocate_shared_memory(from_ptr.dtype.element_ty, [COUNT], None)
    async_copy.async_copy_global_to_shared(shared, from_ptr + offs, mask=offs < count)
    async_copy.commit_group()
    if WAIT:
        async_copy.wait_group(0)
    gl.store(to_ptr + offs, shared.load(None) + 1, mask=offs < count)
"""


def check_copy(path: Path, wait: bool) -> None:
    from tests.kernels.gluon_interpreter import interpreted

    kernel = interpreted(path).copy_kernel
    numbers = torch.arange(12.0)
    out = torch.full((8,), -1.0)
    kernel[(2,)](num_warps=4, from_ptr=numbers[3:], to_ptr=out, count=6, WAIT=wait)
    assert torch.equal(out[6:], torch.full((2,), -1.0))
    if wait:
        assert torch.equal(out[:6], numbers[4:10])
    else:
        assert out[:6].isnan().all()


@pytest.mark.parametrize("wait", [True, False])
def test_copies_arrive_when_the_kernel_has_waited(interpreter, tmp_path, wait):
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    interpreter.submit(check_copy, path, wait).result()


def check_gluon_is_there() -> None:
    from triton.experimental import gluon

    from tests.kernels.gluon_interpreter import Machine

    with Machine().imported():
        from triton.experimental import gluon as interpreted

        assert interpreted is not gluon
    from triton.experimental import gluon as after

    assert after is gluon


def test_others_import_the_real_modules(interpreter):
    interpreter.submit(check_gluon_is_there).result()
