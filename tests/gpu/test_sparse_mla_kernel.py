"""The sparse MLA kernels on a real GPU, against the float64 reference."""

import pytest
import torch

from tests.kernels.overlay import load_overlay
from tests.kernels.reference import (
    RANK,
    Inputs,
    assert_matches_reference,
    make_inputs,
    sparse_mla_reference,
)

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
NUM_TOPK = 2048
NUM_ROWS = 20_000


@pytest.fixture(scope="module")
def kernels():
    return load_overlay("vllm.v1.attention.ops.triton_mla_sparse")


def gpu_inputs(counts: list[int], num_heads: int, dtype: torch.dtype, **options) -> Inputs:
    return make_inputs(
        counts,
        num_heads,
        options.pop("num_topk", NUM_TOPK),
        num_rows=NUM_ROWS,
        dtype=dtype,
        device="cuda",
        **options,
    )


def num_splits(kernels, inputs: Inputs) -> int:
    """Return the split count the backend would choose on this GPU."""
    num_tokens, num_heads, _ = inputs.q_nope.shape
    num_head_blocks = -(-num_heads // kernels.get_config(num_heads).block_h)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return kernels.get_num_splits(num_tokens, num_head_blocks, num_sms)


def check(kernels, inputs: Inputs, splits: int) -> None:
    out, lse = kernels.sparse_mla_attention(*inputs, num_splits=splits)
    tolerance = TOLERANCE[inputs.q_nope.dtype]
    assert_matches_reference(out, lse, inputs, out_tolerance=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_heads", [1, 8, 16, 20, 32, 64, 96, 128])
@pytest.mark.parametrize("num_tokens", [1, 3, 64, 300])
def test_decode_and_prefill_shapes(kernels, num_tokens, num_heads, dtype):
    """Every configuration, with the split count the backend chooses."""
    counts = [max(NUM_TOPK - 7 * token, 0) for token in range(num_tokens)]
    inputs = gpu_inputs(counts, num_heads, dtype)
    check(kernels, inputs, num_splits(kernels, inputs))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rope_dim", [64, 0])
@pytest.mark.parametrize("num_topk", [64, 512, 1000, 2048, 2176])
def test_any_topk_with_and_without_rope(kernels, num_topk, rope_dim, dtype):
    counts = [num_topk, num_topk - 1, 33, 1, 0]
    inputs = gpu_inputs(counts, 8, dtype, num_topk=num_topk, rope_dim=rope_dim)
    check(kernels, inputs, num_splits(kernels, inputs))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_splits_equal_the_serial_kernel(kernels, num_heads, dtype):
    inputs = gpu_inputs([2048, 1999, 65, 1, 0], num_heads, dtype)
    serial_out, serial_lse = kernels.sparse_mla_attention(*inputs)
    splits = 2
    while splits <= kernels.MAX_SPLITS:
        out, lse = kernels.sparse_mla_attention(*inputs, num_splits=splits)
        error = (out.float() - serial_out.float()).norm() / serial_out.float().norm()
        assert error <= TOLERANCE[dtype]
        torch.testing.assert_close(lse, serial_lse, rtol=0, atol=1e-4)
        splits *= 2


@pytest.mark.parametrize("splits", [1, 8])
def test_unused_rows_may_hold_nan(kernels, splits):
    inputs = gpu_inputs([2000, 63, 0], 8, torch.float16)
    used = torch.cat([row[:n] for row, n in zip(inputs.topk, inputs.valid_count, strict=True)]).long()
    unused = torch.ones(NUM_ROWS, dtype=torch.bool, device="cuda")
    unused[used] = False
    inputs.kv[unused] = float("nan")
    check(kernels, inputs, splits)


@pytest.mark.parametrize("splits", [1, 8])
def test_strided_query(kernels, splits):
    inputs = gpu_inputs([2048, 700, 5], 20, torch.float16)
    expected = kernels.sparse_mla_attention(*inputs, num_splits=splits)
    inputs.q_nope = inputs.q_nope.transpose(0, 1).contiguous().transpose(0, 1)
    assert not inputs.q_nope.is_contiguous()
    result = kernels.sparse_mla_attention(*inputs, num_splits=splits)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    q = torch.cat((inputs.q_nope, inputs.q_pe), dim=-1)
    inputs.q_nope, inputs.q_pe = q[..., :RANK], q[..., RANK:]
    result = kernels.sparse_mla_attention(*inputs, num_splits=splits)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_rows_past_two_to_the_31_elements(kernels):
    inputs = gpu_inputs([2048, 70], 8, torch.float16)
    width = inputs.kv.shape[1]
    first = 2**31 // width + 1
    cache = torch.empty((first + NUM_ROWS, width), dtype=torch.float16, device="cuda")
    cache[first:] = inputs.kv
    inputs.kv = cache
    inputs.topk[inputs.topk >= 0] += first
    check(kernels, inputs, 8)


def test_graph_replay_follows_new_indices_and_lengths(kernels):
    """A captured launch reads the lists when it is replayed; padded tokens are empty."""
    captured = gpu_inputs([2048] * 4, 8, torch.float16)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    workspace = [torch.full(shape, float("nan"), device="cuda") for shape in kernels.get_workspace_shapes(8, num_sms)]

    def run():
        splits = num_splits(kernels, captured)
        return kernels.sparse_mla_attention(*captured, num_splits=splits, workspace=workspace)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    for seed, counts in enumerate([[2048, 1, 700, 64], [5, 2047, 0, 0], [0, 0, 0, 0]], start=1):
        replayed = gpu_inputs(counts, 8, torch.float16, seed=seed)
        for name, value in vars(replayed).items():
            if isinstance(value, torch.Tensor):
                getattr(captured, name).copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        assert_matches_reference(out, lse, replayed)


@pytest.mark.parametrize("num_heads", [8, 32, 64])
@pytest.mark.parametrize("rope_dim", [64, 0])
def test_warmup_compiles_every_variant(kernels, num_heads, rope_dim, monkeypatch):
    """After the warm-up that the backend registers, no launch compiles anything."""
    import triton

    dtype = torch.float16
    for kernel in (kernels.sparse_mla_kernel, kernels.merge_splits_kernel):
        kernel.device_caches.clear()
    kernels.sparse_mla.warmup(num_heads=num_heads, dtype=dtype, has_rope=rope_dim > 0)
    kernels.merge_splits.warmup(dtype=dtype)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, repr, **_: compiled.append(repr))
    for num_tokens in [1, 2, 3, 16, 17, 31, 64, 100, 128, 257]:
        inputs = gpu_inputs([64] * num_tokens, num_heads, dtype, rope_dim=rope_dim)
        inputs.q_nope = inputs.q_nope.transpose(0, 1).contiguous().transpose(0, 1)
        kernels.sparse_mla_attention(*inputs, num_splits=num_splits(kernels, inputs))
    assert not compiled
    config = kernels.SparseMLAConfig(16, 16, 4, 1)
    kernels.sparse_mla_attention(*inputs, config=config)
    assert compiled, "the hook sees a compilation"


def test_reference_agrees_across_devices():
    """The reference on the GPU, which the other tests use, against the CPU."""
    inputs = gpu_inputs([100, 3], 8, torch.float16)
    on_cpu = Inputs(*(value.cpu() for value in list(inputs)[:5]))
    for result, expected in zip(sparse_mla_reference(inputs), sparse_mla_reference(on_cpu), strict=True):
        torch.testing.assert_close(result.cpu(), expected)
