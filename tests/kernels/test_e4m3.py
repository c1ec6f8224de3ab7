"""The e4m3 encoder against PyTorch's conversion, in Triton's interpreter on the CPU, and who gets it.

The `check_` functions run in the interpreter process. On a GPU, tests/gpu/test_dsa_kernels.py compares the encoder
with the conversion instruction on every float.
"""

import struct
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.overlay import load_overlay

MAX = 448.0


def expected(x: torch.Tensor) -> torch.Tensor:
    """Return PyTorch's e4m3 patterns; it turns what is out of range into NaN, the instruction does not."""
    return x.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def check(x: torch.Tensor) -> None:
    from tests.kernels.e4m3_kernels import encode

    codes, reference = encode(x), expected(x)
    wrong = codes != reference
    assert not wrong.any(), list(zip(x[wrong].tolist(), codes[wrong].tolist(), reference[wrong].tolist(), strict=True))


def check_16_bit(dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    check(x[~x.isnan()])


def check_neighbourhoods() -> None:
    """Every e4m3 value and every midpoint of two, with the floats next to it."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    # 464 would be the midpoint to the next value, if there were one.
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([464.0, 480.0])])
    bits = points.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    x = bits[bits >= 0].view(torch.float32)
    check(torch.cat([x, -x]))


def check_extremes() -> None:
    tiny, huge, infinity = 2.0**-149, 3.4e38, float("inf")
    check(torch.tensor([0.0, tiny, 2.0**-126, 2.0**-10, huge, infinity]))
    check(-torch.tensor([0.0, tiny, 2.0**-126, 2.0**-10, huge, infinity]))


def check_nan() -> None:
    from tests.kernels.e4m3_kernels import encode

    bits = [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFFFFFF]
    x = torch.tensor(struct.unpack("6i", struct.pack("6I", *bits)), dtype=torch.int32).view(torch.float32)
    assert encode(x).tolist() == [0x7F] * 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_every_16_bit_value(interpreter, dtype):
    interpreter.submit(check_16_bit, dtype).result()


@pytest.mark.parametrize("check", [check_neighbourhoods, check_extremes, check_nan])
def test_where_rounding_changes(interpreter, check):
    interpreter.submit(check).result()


@settings(max_examples=50, deadline=None)
@given(x=st.lists(st.floats(width=32, allow_nan=False) | st.floats(-500, 500, width=32), min_size=1, max_size=64))
def test_any_float(interpreter, x):
    interpreter.submit(check, torch.tensor(x)).result()


def lacks_e4m3(is_cuda: bool, capability: tuple[int, int] | None) -> bool:
    module = load_overlay("vllm.v1.attention.ops.e4m3")
    from vllm.platforms.interface import DeviceCapability

    found = None if capability is None else DeviceCapability(*capability)
    return module.lacks_e4m3(SimpleNamespace(is_cuda=lambda: is_cuda, get_device_capability=lambda: found))


@pytest.mark.parametrize(
    ("is_cuda", "capability", "software"),
    [
        *((True, capability, True) for capability in [(7, 5), (8, 0), (8, 6), (8, 7)]),
        *((True, capability, False) for capability in [(8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]),
        (True, None, False),
        (False, (8, 0), False),
    ],
)
def test_gpus_that_lack_e4m3(interpreter, is_cuda, capability, software):
    assert interpreter.submit(lacks_e4m3, is_cuda, capability).result() is software
