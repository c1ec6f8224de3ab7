"""Which top-k kernel the indexer takes on which GPU, and that the wheel's binaries fit there.

Two levels choose: SparseIndexerTopk in Python, by capability, and within persistent_topk csrc/topk.cu, by the shared
memory that a block may have. Here is the first, and what the second relies on: how much shared memory the kernels take
for themselves, read from the wheel for every architecture. tests/gpu/test_indexer_topk.py shows the second.
"""

import re
import subprocess
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.gpu.topk_on import KINDS, assert_exact, make_logits, spoil
from tests.kernels.compilation import SHARED_MEMORY

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1)]
PERSISTENT = (512, 1024, 2048)
# What a kernel may take without asking: top_k_per_row is launched so.
UNASKED = 48 << 10
# Dynamic shared memory of FilteredTopK and sampled_topk (FILTERED_TOPK_SMEM_DYNAMIC).
FILTERED = 128 << 10
# From SM90 on the figures of cuobjdump have what CUDA keeps of every block, which is not the block's.
KEPT = 1024


def choose(capability: tuple[int, int], num_topk: int, num_rows: int) -> str:
    from vllm.model_executor.layers.indexer_topk import SparseIndexerTopk
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    platform = type(current_platform)
    answer = classmethod(lambda cls, device_id=0: DeviceCapability(*capability))
    with patch.object(platform, "get_device_capability", answer):
        return SparseIndexerTopk("auto").resolve_backend(torch.empty(num_rows, 4096), num_topk, num_rows)


@pytest.mark.parametrize("num_rows", [1, 64, 65, 512])
@pytest.mark.parametrize("num_topk", [*PERSISTENT, 2176])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda value: "{}.{}".format(*value))
def test_choice(interpreter, capability, num_topk, num_rows):
    """Only SM90 has clusters enough for cooperative_topk; the rest shares persistent_topk, or top_k_per_row."""
    expected = "persistent" if num_topk in PERSISTENT else "per_row"
    if expected == "persistent" and capability == (9, 0) and num_rows <= 64:
        expected = "cooperative"
    assert interpreter.submit(choose, capability, num_topk, num_rows).result() == expected


@cache
def static_shared(library: Path, arch: int) -> dict[str, int]:
    """Return the static shared memory, in bytes, of each kernel that the library has for an architecture."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [cuobjdump, "-res-usage", "-arch", f"sm_{arch}", library]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"Function (\S+):\n.* SHARED:(\d+)", text)
    return {name: max(0, int(size) - (KEPT if arch >= 90 else 0)) for name, size in found}


@pytest.fixture(params=[80, 86, 89, 120], ids="sm_{}".format)
def binaries(request, patched_package: Path) -> tuple[int, dict[str, int]]:
    """An architecture of the wheel, and what its top-k kernels take. sm_120 serves 12.1 as well."""
    kernels = static_shared(patched_package / "_C_stable_libtorch.abi3.so", request.param)
    return request.param, {name: size for name, size in kernels.items() if "topk" in name.lower()}


def of(kernels: dict[str, int], name: str) -> list[int]:
    sizes = [size for kernel, size in kernels.items() if name in kernel]
    assert sizes, f"the wheel has no {name} for this architecture"
    return sizes


def test_persistent_topk_leaves_all_shared_memory_to_its_host_code(binaries):
    """topk.cu cuts the rows so that the dynamic part fits the GPU: nothing may come on top of it."""
    _, kernels = binaries
    assert of(kernels, "persistent_topk_kernel") == [0] * 9  # three values of k, three widths of loads


def test_top_k_per_row_fits_every_gpu(binaries):
    """Static memory and one int32 for each of the k, two where a row is split; 2176 is the widest top-k."""
    _, kernels = binaries
    assert max(of(kernels, "topKPerRowPrefill")) + 4 * 2176 <= UNASKED
    assert max(of(kernels, "topKPerRowDecodeILi512E")) + 8 * 2176 <= UNASKED
    assert max(of(kernels, "topKPerRowDecodeILi1024ELb1ELb0ELb1E")) + 4 * 2176 <= UNASKED  # merges a split row


def test_what_needs_128_kb_fits_where_it_is_taken(binaries):
    """topk.cu takes FilteredTopK from 128 KB a block on, sampled_topk from 144 KB on: on SM80, and on no 99 KB."""
    arch, kernels = binaries
    needed = FILTERED + max(of(kernels, "FilteredTopKUnifiedKernel") + of(kernels, "sampled_topk_kernel"))
    assert (needed <= SHARED_MEMORY[arch]) == (arch == 80)
    assert arch == 80 or SHARED_MEMORY[arch] < 128 << 10


# The check that the GPU tests rely on


def test_the_check_takes_torch_topk_on_all_kinds_of_logits():
    lengths, starts = torch.tensor([700, 64, 65, 0, 3]), torch.tensor([0, 5, 30, 100, 697])
    for kind in KINDS:
        logits = spoil(make_logits(kind, 5, 700, "cpu"), lengths, starts)
        indices = torch.full((5, 64), -1, dtype=torch.int32)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            inside = logits[row, start : start + length]
            count = min(64, len(inside))
            indices[row, :count] = inside.topk(count).indices.int()
        assert_exact(logits, lengths, indices, starts)


@pytest.mark.parametrize(
    ("row", "wrong", "message"),
    [
        (0, [0, 1, 2, 4], "other values"),
        (0, [9, 8, 7, 7], "a column twice"),
        (0, [9, 8, 7, -1], "wrong number"),
        (1, [1, 0, 2, -1], "wrong number"),
        (1, [2, 0, -1, -1], "outside the row"),
        (2, [0, -1, -1, -1], "wrong number"),
    ],
)
def test_the_check_refuses_what_is_not_the_top_k(row, wrong, message):
    logits = torch.arange(10.0).repeat(3, 1)
    lengths = torch.tensor([10, 2, -1])
    indices = torch.tensor([[9, 7, 8, 6], [0, 1, -1, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    assert_exact(logits, lengths, indices)
    indices[row] = torch.tensor(wrong, dtype=torch.int32)
    with pytest.raises(AssertionError, match=message):
        assert_exact(logits, lengths, indices)
