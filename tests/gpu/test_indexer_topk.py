"""The indexer's top-k on each GPU that it serves: which kernel is reached, that it fits there, that it is exact.

Every GPU below has a process that believes in it (topk_on.py): vLLM chooses by its capability, csrc/topk.cu by its
shared memory and multiprocessors. The kernels that are then launched, and their dynamic shared memory, are read out of
a CUDA graph. That proves the choice, that it fits, and the algorithm with the tile sizes of that GPU. It does not run
the binaries of other architectures (tests/backend/test_indexer_topk_choice.py shows that the wheel has them, and how
much static shared memory they take), nor prove that their blocks are resident together, as persistent_topk requires.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import pytest
import torch

from tests.gpu.topk_on import KINDS, Gpu, assert_exact, become, launches, make_logits, spoil
from tests.kernels.compilation import SHARED_MEMORY

pytestmark = pytest.mark.gpu

GPUS = [
    Gpu("A100", (8, 0), 216),
    Gpu("RTX 3090", (8, 6), 82),
    Gpu("RTX 4090", (8, 9), 128),
    Gpu("H200", (9, 0), 264),
    Gpu("RTX PRO 6000", (12, 0), 188),
    Gpu("GB10", (12, 1), 48),
]
# Lengths of rows: around the top-k, where the kernels change their algorithm, more than 200k, and a padded row's.
LENGTHS = [200_003, 2049, 131_072, -1, 8192, 2048, 32_769, 1, 2047, 8193, 0, 32_768, 513, 262_144]
TOPK = [512, 1024, 2048]


@dataclass(frozen=True)
class Batch:
    """Decoding requests."""

    requests: int
    next_n: int = 1
    width: int = 262_144  # of the logits: the longest context that is possible

    @property
    def rows(self) -> int:
        return self.requests * self.next_n

    def __str__(self) -> str:
        return f"{self.requests}x{self.next_n}-of-{self.width}"

    def lengths(self) -> torch.Tensor:
        """Return int32 [requests, next_n] on the GPU."""
        fitting = [length for length in LENGTHS if length <= self.width]
        values = [fitting[row % len(fitting)] for row in range(self.rows)]
        return torch.tensor(values, dtype=torch.int32, device="cuda").view(self.requests, self.next_n)


LONG = Batch(4, width=1 << 20)  # a row takes 124 blocks of persistent_topk at a time
BATCHES = [
    Batch(1),
    Batch(4),
    Batch(8),
    Batch(32),
    Batch(33),
    Batch(64),
    Batch(65),
    Batch(32, next_n=4),
    Batch(7, next_n=2, width=16_384),
    Batch(40, width=16_384),
    LONG,
]


def expected_kernel(gpu: Gpu, batch: Batch, num_topk: int) -> str:
    """Return what the name of the kernel contains that `gpu` has to reach."""
    if num_topk not in TOPK:
        return "topKPerRowDecode"
    if gpu.capability == (9, 0) and batch.rows <= 64:
        return "cooperative_topk"
    if gpu.shared < 128 << 10:  # 99 KB: 86, 89, 120, 121
        return "topKPerRowDecode" if batch == LONG and gpu.resident < 124 else "persistent_topk_kernel"
    if batch.rows > 64 and batch.width > 65_536:
        return "sampled_topk_kernel"
    return "FilteredTopKUnifiedKernel" if batch.rows > 32 else "persistent_topk_kernel"


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[Gpu, ProcessPoolExecutor]]:
    """A process for each GPU. All start at once, since importing vLLM is what takes time."""
    pools = {
        gpu: ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=become, initargs=(gpu,))
        for gpu in GPUS
        if not cannot_become(gpu)
    }
    for pool in pools.values():
        pool.submit(torch.cuda.is_available)
    yield pools
    for pool in pools.values():
        pool.shutdown()


def run(pool: ProcessPoolExecutor, function: Callable[..., None], *arguments: object) -> None:
    """Call `function` in the pool's process. Blocks that wait for each other for ever end with the process."""
    try:
        pool.submit(function, *arguments).result(timeout=180)
    except TimeoutError:
        for process in list(pool._processes.values()):
            process.kill()
        raise


def cannot_become(gpu: Gpu) -> str:
    """Return why the GPU that is there cannot stand for `gpu`, or nothing."""
    major, minor = torch.cuda.get_device_capability()
    if gpu.capability == (9, 0) and (major, minor) != (9, 0):
        return "cooperative_topk needs an SM90 GPU"
    if SHARED_MEMORY.get(10 * major + minor, 0) < gpu.shared:
        return f"needs a GPU with the shared memory of {gpu.name}, {gpu.shared} bytes a block"
    return ""


def check_decode(gpu: Gpu, batch: Batch, num_topks: list[int], kinds: list[str]) -> None:
    from vllm.model_executor.layers.indexer_topk import get_indexer_topk

    lengths = batch.lengths()
    max_length = int(lengths.max())
    for kind in kinds:
        logits = spoil(make_logits(kind, batch.rows, batch.width), lengths.flatten())
        for num_topk in num_topks:
            indices = torch.full((batch.rows, num_topk), -2, dtype=torch.int32, device="cuda")

            def select(logits=logits, indices=indices, num_topk=num_topk) -> None:
                get_indexer_topk("auto")(logits, lengths, batch.next_n, indices, num_topk, max_length)

            select()
            try:
                assert_exact(logits, lengths.flatten(), indices)
            except AssertionError as error:
                raise AssertionError(f"{kind}, top-k {num_topk}: {error}") from error
            if kind == kinds[0]:
                launched = launches(select)
                name = expected_kernel(gpu, batch, num_topk)
                assert any(name in launch.name for launch in launched), (name, launched)
                assert all(launch.dynamic_shared <= gpu.shared for launch in launched), launched


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_decode(processes, gpu, batch):
    if reason := cannot_become(gpu):
        pytest.skip(reason)
    kinds = KINDS
    if "topKPerRow" in expected_kernel(gpu, batch, 2048):
        kinds = KINDS[:-1]  # rows of less than k finite values: no indexer's logits are infinite
    run(processes[gpu], check_decode, gpu, batch, TOPK, kinds)


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_decode_of_another_width(processes, gpu):
    """2176 is GLM-5.3-Flash's top-k; only the kernels of one block a row take any width."""
    if reason := cannot_become(gpu):
        pytest.skip(reason)
    for batch in (Batch(3), Batch(33), Batch(9, next_n=2, width=8192)):
        run(processes[gpu], check_decode, gpu, batch, [2176], KINDS[:-1])


def test_lengths_decide_not_the_width_of_the_logits(processes):
    """A batch of short contexts in a model of long ones, where blocks of persistent_topk end early."""
    gpu = GPUS[1]
    if reason := cannot_become(gpu):
        pytest.skip(reason)
    run(processes[gpu], check_short_contexts)


def check_short_contexts() -> None:
    from vllm.model_executor.layers.indexer_topk import get_indexer_topk

    lengths = torch.tensor([[3000], [-3], [2048], [5]], dtype=torch.int32, device="cuda").repeat(32, 1)
    logits = spoil(make_logits("ties", 128, 262_144), lengths.flatten())
    indices = torch.full((128, 2048), -2, dtype=torch.int32, device="cuda")
    get_indexer_topk("auto")(logits, lengths, 1, indices, 2048, 3000)
    assert_exact(logits, lengths.flatten(), indices)


# Prefill: one kernel for every GPU


def prefill_topk(logits, starts, ends, num_topk):
    from vllm import _custom_ops as ops

    indices = torch.full((len(logits), num_topk), -2, dtype=torch.int32, device="cuda")
    ops.top_k_per_row_prefill(logits, starts, ends, indices, len(logits), logits.stride(0), logits.stride(1), num_topk)
    return indices


@pytest.mark.parametrize("num_topk", [*TOPK, 2176])
@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("has_starts", [False, True], ids=["from-0", "from-starts"])
def test_prefill(has_starts, kind, num_topk):
    """Rows of every length, from column 0 as the indexer's, or from columns of their own."""
    num_rows, width = 140, 262_144
    values = [max(LENGTHS[row % len(LENGTHS)], 0) for row in range(num_rows)]
    lengths = torch.tensor(values, dtype=torch.int32, device="cuda")
    starts = torch.zeros_like(lengths)
    if has_starts:
        width += 300
        starts += torch.arange(num_rows, dtype=torch.int32, device="cuda")
    logits = spoil(make_logits(kind, num_rows, width), lengths, starts)
    indices = prefill_topk(logits, starts, starts + lengths, num_topk)
    assert_exact(logits, lengths, indices, starts)


@pytest.mark.parametrize("kind", ["random", "ties", "zeros"])
def test_prefill_of_many_rows(kind):
    """From row 12288 on another variant of the kernel serves. The lengths grow, as in a prompt."""
    num_rows, width = 13_000, 13_000
    lengths = torch.arange(1, num_rows + 1, dtype=torch.int32, device="cuda")
    logits = spoil(make_logits(kind, num_rows, width), lengths)
    indices = prefill_topk(logits, torch.zeros_like(lengths), lengths, 2048)
    for rows in torch.arange(num_rows, device="cuda").split(1000):
        assert_exact(logits[rows], lengths[rows], indices[rows])


def test_prefill_takes_what_every_gpu_gives_a_block():
    """Without asking for more: static and dynamic shared memory together stay below 48 KB."""
    logits = make_logits("random", 4, 8192)
    lengths = torch.full((4,), 8192, dtype=torch.int32, device="cuda")
    prefill_topk(logits, torch.zeros_like(lengths), lengths, 2176)
    launched = launches(lambda: prefill_topk(logits, torch.zeros_like(lengths), lengths, 2176))
    kernels = [launch for launch in launched if "topKPerRowPrefill" in launch.name]
    assert [launch.dynamic_shared for launch in kernels] == [4 * 2176]
