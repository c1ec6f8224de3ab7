"""vLLM's indexer top-k as another GPU runs it, in a process that believes in that GPU; and what is launched there.

Two places choose the kernel: SparseIndexerTopk in Python, by compute capability, and csrc/topk.cu, by the shared memory
that a block may have and by the number of multiprocessors. Both ask a record that can be changed before the first call:
vLLM's platform, and the extension's own copy of the CUDA device properties.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.kernels.compilation import SHARED_MEMORY


@dataclass(frozen=True)
class Gpu:
    """What the choice of a top-k kernel depends on."""

    name: str
    capability: tuple[int, int]
    resident: int  # blocks of 1024 threads that it runs at a time

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block may have."""
        major, minor = self.capability
        return SHARED_MEMORY[10 * major + minor]

    def __str__(self) -> str:
        return self.name.lower().replace(" ", "-")


@dataclass(frozen=True)
class Launch:
    """A kernel in a CUDA graph."""

    name: str  # mangled
    dynamic_shared: int  # bytes


def become(gpu: Gpu) -> None:
    """Make this process believe that `gpu` is there. The GPU that is there must have at least as much of all."""
    from vllm.platforms import cuda
    from vllm.v1.worker.workspace import init_workspace_manager

    torch.cuda.init()
    capability = cuda.DeviceCapability(*gpu.capability)
    for platform in (cuda.NvmlCudaPlatform, cuda.NonNvmlCudaPlatform):
        platform.get_device_capability = classmethod(lambda cls, device_id=0: capability)
    real = torch.cuda.get_device_properties(0)
    # topk.cu asks the driver how many blocks a multiprocessor takes; that answer is the real GPU's.
    multiprocessors = gpu.resident // (real.max_threads_per_multi_processor // 1024)
    _change_properties([
        (ctypes.c_size_t, SHARED_MEMORY[10 * real.major + real.minor], gpu.shared),  # sharedMemPerBlockOptin
        # More blocks than really run at a time would wait for each other for ever.
        (ctypes.c_int, real.multi_processor_count, min(multiprocessors, real.multi_processor_count)),
    ])  # fmt: skip
    init_workspace_manager(torch.device("cuda"))


def _change_properties(changes: list[tuple[type, int, int]]) -> None:
    """Overwrite fields of the extension's cudaDeviceProp, given as (type, old value, new value).

    The offset of a field differs between CUDA versions: it is the first one of its type with the old value. What comes
    before the two fields above are the GPU's name (256 bytes), sizes of memory, and limits of blocks and textures.
    """
    import vllm._C_stable_libtorch

    get_device_prop = ctypes.CDLL(vllm._C_stable_libtorch.__file__)._Z15get_device_propv
    get_device_prop.restype = ctypes.c_void_p
    address = get_device_prop()
    first, last = 256, 832
    for field, old, new in changes:
        fields = (field * ((last - first) // ctypes.sizeof(field))).from_address(address + first)
        if old not in list(fields):
            raise RuntimeError(f"the device properties have no {field.__name__} that is {old}")
        fields[list(fields).index(old)] = new


class _KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    ]


def launches(call: Callable[[], object]) -> list[Launch]:
    """Return the kernels that `call` launches, read from a CUDA graph of it."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    driver = ctypes.CDLL("libcuda.so.1")

    def ask(function: str, *arguments: object) -> None:
        if status := getattr(driver, function)(*arguments):
            raise RuntimeError(f"{function} returned CUDA error {status}")

    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    ask("cuGraphGetNodes", handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    ask("cuGraphGetNodes", handle, nodes, ctypes.byref(count))
    found = []
    for node in map(ctypes.c_void_p, nodes):
        kind = ctypes.c_int()
        ask("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value != 0:  # CU_GRAPH_NODE_TYPE_KERNEL
            continue
        params, name = _KernelNodeParams(), ctypes.c_char_p()
        ask("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
        if params.func:
            ask("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.func))
        else:
            ask("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kern))
        found.append(Launch(name.value.decode(), params.shared))
    return found


# Rows of logits


def make_logits(kind: str, num_rows: int, width: int, device: str = "cuda") -> torch.Tensor:
    """Return fp32 [num_rows, width] without NaN: logits as an indexer gives them, and worse."""
    generator = torch.Generator(device).manual_seed(0)

    def uniform() -> torch.Tensor:
        return torch.rand(num_rows, width, generator=generator, device=device)

    if kind == "random":
        return torch.randn(num_rows, width, generator=generator, device=device)
    if kind == "ties":
        return (uniform() * 8).floor_() - 4
    if kind == "zeros":  # what is left of mostly negative products
        return (uniform() - 0.99).clamp_min_(0)
    if kind == "equal":
        return torch.full((num_rows, width), -0.75, device=device)
    if kind == "close":  # neighbours in fp32: they differ in the last ten bits only
        bits = 0x3F900000 + (uniform() * 1024).int()
        return bits.view(torch.float32)
    assert kind == "minus-inf"  # mostly, so that the top-k has some of them
    return torch.where(uniform() < 0.002, uniform(), -torch.inf)


KINDS = ["random", "ties", "zeros", "equal", "close", "minus-inf"]


def spoil(logits: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Fill what is outside a row, in place, by turns with NaN and infinity: kernels leave anything there."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    outside = columns >= lengths[:, None]
    if starts is not None:
        outside = (columns < starts[:, None]) | (columns >= (starts + lengths)[:, None])
    logits[0::2].masked_fill_(outside[0::2], torch.nan)
    logits[1::2].masked_fill_(outside[1::2], torch.inf)
    return logits


def assert_exact(
    logits: torch.Tensor, lengths: torch.Tensor, indices: torch.Tensor, starts: torch.Tensor | None = None
) -> None:
    """Assert that each row names min(length, k) different columns, those of the largest values, and -1 for the rest.

    Args:
        logits: fp32 [rows, width].
        lengths: int32 [rows]; below 0 is 0.
        indices: int32 [rows, k], counted from the start of the row.
        starts: int32 [rows], the column at which a row starts; None is 0.

    """
    num_topk, width = indices.shape[1], logits.shape[1]
    lengths = lengths.long().clamp(0, width)[:, None]
    first = torch.zeros_like(lengths) if starts is None else starts.long()[:, None]
    chosen = indices >= 0
    assert torch.equal(chosen.sum(1, keepdim=True), lengths.clamp_max(num_topk)), "wrong number of columns"
    assert ((indices >= -1) & (indices < lengths)).all(), "a column outside the row"
    ordered = indices.sort(1).values
    assert not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(), "a column twice"

    columns = torch.arange(width, device=logits.device)
    inside = (columns >= first) & (columns < first + lengths)
    expected = logits.masked_fill(~inside, -torch.inf).topk(min(num_topk, width)).values
    picked = (indices.long().clamp_min(0) + first).clamp_max(width - 1)
    found = logits.gather(1, picked).masked_fill(~chosen, -torch.inf).sort(1, descending=True).values
    assert torch.equal(found[:, : expected.shape[1]], expected), "other values than torch.topk"
