"""Kernels in Gluon, run on the CPU as what they are: Python functions, with tensors of torch for tensors.

Triton's own interpreter does not know Gluon. This one does what a kernel says, one program after the other, and says
nothing about layouts, barriers and speed. Two things are stricter than a GPU: what nobody has written is NaN, and an
asynchronous copy arrives when the kernel has waited for it and not before.
"""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import accumulate, product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton.experimental
from triton.language import constexpr

GLUON = "triton.experimental.gluon"


def _poison(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)


@dataclass
class Pointer:
    """Addresses of elements in the storage of a tensor."""

    storage: torch.Tensor  # all of it, flat
    offsets: torch.Tensor  # int64, in elements

    @classmethod
    def to_tensor(cls, tensor: torch.Tensor) -> "Pointer":
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return cls(flat, torch.tensor(tensor.storage_offset()))

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.storage.dtype)

    def __add__(self, offsets: Any) -> "Pointer":
        return Pointer(self.storage, self.offsets + offsets)

    def __getitem__(self, index: Any) -> "Pointer":
        return Pointer(self.storage, self.offsets[index])

    def to(self, dtype: torch.dtype, bitcast: bool) -> "Pointer":
        assert bitcast
        size = self.storage.element_size()
        return Pointer(self.storage.view(dtype), self.offsets * size // dtype.itemsize)

    def load(self, mask: Any, other: Any) -> torch.Tensor:
        if mask is None:
            return self.storage[self.offsets]
        offsets, mask = torch.broadcast_tensors(self.offsets, torch.as_tensor(mask))
        value = _poison(list(offsets.shape), self.storage.dtype)
        if other is not None:
            value.fill_(other)
        value[mask] = self.storage[offsets[mask]]
        return value

    def store(self, value: Any, mask: Any) -> None:
        mask = torch.as_tensor(True if mask is None else mask)
        offsets, value, mask = torch.broadcast_tensors(self.offsets, torch.as_tensor(value), mask)
        self.storage[offsets[mask]] = value[mask].to(self.storage.dtype)


@dataclass
class SharedMemory:
    """A view of a program's shared memory."""

    data: torch.Tensor

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, index: int) -> "SharedMemory":
        return SharedMemory(self.data[int(index)])

    def slice(self, start: int, length: int, dim: int = 0) -> "SharedMemory":
        return SharedMemory(self.data.narrow(dim, int(start), length))

    def permute(self, order: tuple[int, ...]) -> "SharedMemory":
        return SharedMemory(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "SharedMemory":
        return SharedMemory(self.data.view(dtype).view(shape))

    def load(self, layout: Any) -> torch.Tensor:
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.data.shape
        assert value.dtype == self.data.dtype
        self.data.copy_(value)

    def gather(self, indices: torch.Tensor, axis: int) -> torch.Tensor:
        return self.data.gather(axis, indices.long())

    def scatter(self, values: torch.Tensor, indices: torch.Tensor, axis: int) -> None:
        self.data.scatter_(axis, indices.long(), values)

    def atomic_scatter_add(self, values: torch.Tensor, indices: torch.Tensor, axis: int, mask: torch.Tensor) -> None:
        self.data.scatter_add_(axis, indices.long(), values * mask)


class Copies:
    """The asynchronous copies of a program."""

    def __init__(self) -> None:
        self.open: list[Callable[[], object]] = []
        self.groups: list[list[Callable[[], object]]] = []

    def async_copy_global_to_shared(self, shared: SharedMemory, pointer: Pointer, mask: Any = None) -> None:
        value = pointer.load(mask, 0)
        assert value.shape == shared.data.shape
        shared.data.copy_(_poison(shared.shape, shared.data.dtype))
        self.open.append(lambda: shared.data.copy_(value))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, num_outstanding: int = 0) -> None:
        while len(self.groups) > num_outstanding:
            for copy in self.groups.pop(0):
                copy()


def _decode_e4m3(words: torch.Tensor, twice: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Four e4m3 bytes of a word, times a pair of factors, to two pairs of float16."""
    values = words.contiguous().view(torch.float8_e4m3fn).to(torch.float16).unflatten(-1, (-1, 2, 2))
    values = values * twice.contiguous().view(torch.float16).unflatten(-1, (-1, 1, 2))
    return tuple(values[..., pair, :].contiguous().view(torch.int32).squeeze(-1) for pair in range(2))


def _decode_keys(word: torch.Tensor) -> torch.Tensor:
    """The four e4m3 bytes of a word as float16."""
    return word.view(torch.float8_e4m3fn).to(torch.float16)


def _decode_keys_shifted(word: torch.Tensor) -> torch.Tensor:
    """The same by moving bits, which divides by 2^8."""
    return _decode_keys(word) / 256


def _decode_values(
    even: torch.Tensor, odd: torch.Tensor, factors: torch.Tensor, decode: Callable[..., torch.Tensor] = _decode_keys
) -> torch.Tensor:
    """The four bytes of two words in turns, times a pair of factors."""
    values = torch.stack((decode(even), decode(odd)), -1)
    return (values * factors.view(torch.float16).unsqueeze(-2)).flatten(-2)


def _pair(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.stack((low, high), -1).to(torch.float16).view(torch.int32).squeeze(-1)


def _bf16_to_fp16(pairs: torch.Tensor) -> torch.Tensor:
    return pairs.contiguous().view(torch.bfloat16).to(torch.float16).view(torch.int32)


def _twice(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float16)[..., None].repeat_interleave(2, -1).view(torch.int32).squeeze(-1)


#: What the inline assembly of the kernels does, told by a part of it; the first that fits.
ASSEMBLY: dict[str, Callable[..., Any]] = {
    "griddepcontrol": lambda: None,
    "prmt.b32 c, a, 0, 0x1404": partial(_decode_values, decode=_decode_keys_shifted),
    "prmt.b32 a, $4, $12": _decode_values,
    "prmt.b32 a, $2": _decode_keys_shifted,
    "cvt.rn.f16x2.e4m3x2 $0, a": _decode_keys,
    "cvt.rn.f16x2.e4m3x2 c, a": _decode_e4m3,
    "cvt.rn.f16x2.f32 $0, $2, $1": _pair,
    "shl.b32 a, $1, 16": _bf16_to_fp16,
    "cvt.rn.f16x2.f32 $0, $1, $1": _twice,
}


def _assembly(text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Run inline assembly. Where it has several results, its operands stand there as often."""
    if pack > 1:
        assert all(arg.shape[-1] == pack and (arg == arg[..., :1]).all() for arg in args)
        args = [arg[..., :1].clone(memory_format=torch.contiguous_format) for arg in args]
    result = next(run for part, run in ASSEMBLY.items() if part in text)(*args)
    return result.view(dtype) if pack > 1 else result


def _dot(a: Any, b: Any, acc: torch.Tensor, **_: Any) -> torch.Tensor:
    a, b = (one.data if isinstance(one, SharedMemory) else one for one in (a, b))
    assert a.dtype == b.dtype
    return a.float() @ b.float() + acc


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any, value: torch.Tensor | None = None) -> SharedMemory:
    shared = SharedMemory(_poison(shape, dtype))
    if value is not None:
        shared.store(value)
    return shared


def _scan(value: torch.Tensor, axis: int, combine: Callable[..., torch.Tensor]) -> torch.Tensor:
    assert value.ndim == 1
    return torch.stack(list(accumulate(value.unbind(axis), combine)), axis)


#: The dtype that torch has and does not divide.
UINT32 = "uint32"
_to = torch.Tensor.to


def _convert(value: torch.Tensor, dtype: Any, bitcast: bool = False) -> torch.Tensor:
    """Do what the `to` of a tensor does in a kernel: numbers of UINT32 are kept in int64."""
    if bitcast:
        return value.view(dtype)
    return _to(value, torch.int64) & 0xFFFFFFFF if dtype is UINT32 else _to(value, dtype)


def _language(program: tuple[int, ...], grid: tuple[int, ...], num_warps: int) -> dict[str, Any]:
    """Return what `gluon.language` holds for a program."""

    def both(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))

    def layout(*_: Any, **__: Any) -> None:
        return None

    names = ("NVMMADistributedLayout", "BlockedLayout", "SliceLayout", "DistributedLinearLayout")
    names += ("NVMMASharedLayout", "SwizzledSharedLayout", "DotOperandLayout")
    return dict.fromkeys(names, layout) | {
        "constexpr": lambda value: value,
        "static_range": range,
        "num_warps": lambda: num_warps,
        "program_id": lambda axis: torch.tensor(program[axis], dtype=torch.int32),
        "num_programs": lambda axis: grid[axis],
        "cdiv": lambda a, b: (a + b - 1) // b,
        "barrier": lambda: None,
        "pointer_type": lambda dtype: dtype,
        "arange": lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
        "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        "full_like": torch.full_like,
        "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        "load": lambda pointer, mask=None, other=None: pointer.load(mask, other),
        "store": lambda pointer, value, mask=None: pointer.store(value, mask),
        "where": torch.where,
        "exp2": torch.exp2,
        "log2": torch.log2,
        "max": lambda value, axis: value.amax(axis),
        "sum": lambda value, axis: value.sum(axis),
        "maximum": both(torch.maximum),
        "minimum": both(torch.minimum),
        "join": lambda a, b: torch.stack((a, b), -1),
        "split": lambda value: value.unbind(-1),
        "reshape": torch.reshape,
        "permute": torch.permute,
        "broadcast": torch.broadcast_tensors,
        "convert_layout": lambda value, layout, assert_trivial=False: value,
        "allocate_shared_memory": _allocate,
        "inline_asm_elementwise": _assembly,
        "associative_scan": _scan,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "int32": torch.int32,
        "int64": torch.int64,
        "uint32": UINT32,
    }


class Kernel:
    """What `gluon.jit` makes of a function: called by kernels as it is, by others with a grid."""

    def __init__(self, function: Callable[..., Any], machine: "Machine") -> None:
        self.function = function
        self.machine = machine
        self.arg_names = list(signature(function).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(num_warps: int, **arguments: Any) -> None:
            given = [arguments[name] for name in self.arg_names]
            given = [Pointer.to_tensor(value) if isinstance(value, torch.Tensor) else value for value in given]
            with patch.object(torch.Tensor, "to", _convert):
                for program in product(*(range(size) for size in grid)):
                    self.machine.start(program, grid, num_warps)
                    self.function(*given)

        return launch


class Machine:
    """The modules that a kernel imports, and the program that they serve."""

    def __init__(self) -> None:
        self.language = ModuleType(f"{GLUON}.language")
        self.copies = ModuleType("async_copy")
        self.start((0,), (1,), 4)

    def start(self, program: tuple[int, ...], grid: tuple[int, ...], num_warps: int) -> None:
        self.language.__dict__.update(_language(program, grid, num_warps))
        copies = Copies()
        for name in ("async_copy_global_to_shared", "commit_group", "wait_group"):
            setattr(self.copies, name, getattr(copies, name))

    def jit(self, function: Callable[..., Any] | None = None, **_: Any) -> Any:
        return Kernel(function, self) if function else lambda function: Kernel(function, self)

    @contextmanager
    def imported(self):
        """Have the modules imported in place of Gluon's."""
        gluon = ModuleType(GLUON)
        gluon.__dict__.update(jit=self.jit, constexpr_function=lambda function: function, language=self.language)
        ampere, hopper, nvidia = (ModuleType(name) for name in ("ampere", "hopper", "nvidia"))
        ampere.__dict__.update(async_copy=self.copies, mma_v2=_dot)
        hopper.__dict__.update(
            fence_async_shared=lambda: None,
            warpgroup_mma=_dot,
            warpgroup_mma_wait=lambda pending, deps: deps if len(deps) > 1 else deps[0],
        )
        modules = {
            GLUON: gluon,
            f"{GLUON}.language": self.language,
            f"{GLUON}.language.nvidia": nvidia,
            f"{GLUON}.language.nvidia.ampere": ampere,
            f"{GLUON}.language.nvidia.hopper": hopper,
        }
        with patch.dict(sys.modules, modules), patch.object(triton.experimental, "gluon", gluon, create=True):
            yield


def interpreted(path: Path) -> ModuleType:
    """Return a module with its kernels interpreted."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    with Machine().imported():
        before = set(sys.modules)
        exec(compile(path.read_text(), path, "exec"), module.__dict__)
        # Modules that it imports are forgotten afterwards, and so are interpreted by its own machine.
        imported = [sys.modules[name] for name in sys.modules.keys() - before]
    for one in (module, *imported):
        for key, value in vars(one).items():
            if isinstance(value, constexpr):
                setattr(one, key, value.value)
    return module
