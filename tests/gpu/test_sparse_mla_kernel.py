"""The sparse MLA kernels on a real GPU, against the float64 reference."""

import random

import pytest
import torch

from tests.kernels.overlay import load_overlay
from tests.kernels.reference import (
    RANK,
    Inputs,
    assert_joined,
    assert_matches_reference,
    launch_unions,
    make_inputs,
    sparse_mla_reference,
)

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
KV_FORMATS = ["16-bit", "fp8_e4m3", "fp8_ds_mla"]
NUM_TOPK = 2048
NUM_ROWS = 20_000


@pytest.fixture(scope="module")
def kernels():
    return load_overlay("vllm.v1.attention.ops.triton_mla_sparse")


@pytest.fixture(scope="module")
def configs():
    return load_overlay("vllm.v1.attention.ops.triton_mla_sparse_config")


def gpu_inputs(counts: list[int], num_heads: int, dtype: torch.dtype, **options) -> Inputs:
    return make_inputs(
        counts,
        num_heads,
        options.pop("num_topk", NUM_TOPK),
        num_rows=options.pop("num_rows", NUM_ROWS),
        dtype=dtype,
        device="cuda",
        **options,
    )


def attention(kernels, inputs: Inputs, **options):
    return kernels.sparse_mla_attention(*inputs, kv_scale=inputs.kv_scale, **options)


def check(kernels, inputs: Inputs, **options) -> None:
    out, lse = attention(kernels, inputs, **options)
    tolerance = TOLERANCE[inputs.q_nope.dtype]
    assert_matches_reference(out, lse, inputs, out_tolerance=tolerance)


# The rows of SM120 run here, too: those cards are not at hand.
@pytest.mark.parametrize("capability", ["own", (12, 0)], ids=["own", "sm120"])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_heads", [1, 4, 8, 11, 16, 20, 22, 32, 64, 128])
def test_every_head_count(kernels, configs, num_heads, dtype, kv_format, capability):
    """Decode and prefill sizes, with the configurations and splits the backend chooses."""
    if capability == "own":
        capability = torch.cuda.get_device_capability()
    for num_tokens, is_prefill in [(1, False), (3, False), (40, False), (300, True)]:
        counts = [max(NUM_TOPK - 7 * token, 0) for token in range(num_tokens)]
        inputs = gpu_inputs(counts, num_heads, dtype, kv_format=kv_format, num_rows=3000)
        config = configs.get_config(num_tokens, num_heads, configs.KVFormat(kv_format), capability, is_prefill)
        check(kernels, inputs, config=config)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rope_dim", [64, 0])
@pytest.mark.parametrize("num_topk", [64, 512, 1152, 2000, 2048, 2176])
def test_any_topk_with_and_without_rope(kernels, num_topk, rope_dim, dtype, kv_format):
    counts = [num_topk, num_topk - 1, 33, 32, 31, 1, 0]
    inputs = gpu_inputs(counts, 8, dtype, num_topk=num_topk, rope_dim=rope_dim, kv_format=kv_format)
    check(kernels, inputs)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_heads", [8, 16, 64])
def test_splits_equal_the_serial_kernel(kernels, num_heads, dtype, kv_format):
    """Also where whole splits are empty."""
    inputs = gpu_inputs([2048, 1999, 65, 1, 0], num_heads, dtype, kv_format=kv_format)
    serial_out, serial_lse = attention(kernels, inputs, num_splits=1)
    for num_splits in (2, 3, 8, 11, 32):
        out, lse = attention(kernels, inputs, num_splits=num_splits)
        error = (out.float() - serial_out.float()).norm() / serial_out.float().norm()
        assert error <= TOLERANCE[dtype]
        torch.testing.assert_close(lse, serial_lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_format", KV_FORMATS[1:])
@pytest.mark.parametrize("capability", ["own", (12, 0), (8, 0)], ids=["own", "sm120", "sm80"])
def test_every_e4m3_pattern_is_exact(kernels, configs, capability, kv_format, dtype):
    """A list of one row makes the output that row. SM80 decodes without an instruction."""
    if capability == "own":
        capability = torch.cuda.get_device_capability()
    config = configs.get_config(64, 8, configs.KVFormat(kv_format), capability)
    inputs = gpu_inputs([1], 8, dtype, kv_format=kv_format)
    finite = [pattern for pattern in range(256) if pattern & 0x7F != 0x7F]
    inputs.kv[inputs.topk[0, 0], : len(finite)] = torch.tensor(finite, dtype=torch.uint8, device="cuda")
    if kv_format == "fp8_e4m3":
        inputs.kv_scale.fill_(0.5)
    expected = sparse_mla_reference(inputs)[0].to(dtype)
    for num_splits in (1, 4):
        out, _ = attention(kernels, inputs, num_splits=num_splits, config=config)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_tokens", [256, 2049])
def test_prefill_whose_neighbours_share_rows(kernels, configs, num_tokens, dtype, kv_format):
    """Two tokens a program; the lists of neighbours overlap by half to not at all, with holes and repetitions."""
    config = configs.get_config(num_tokens, 8, configs.KVFormat(kv_format), (12, 0), is_prefill=True)
    assert config.group == 2
    counts = [300 - token % 300 for token in range(num_tokens)]
    inputs = gpu_inputs(counts, 8, dtype, num_topk=300, num_rows=600, kv_format=kv_format)
    inputs.topk[:, 10] = -1
    inputs.topk[:, 20] = inputs.topk[:, 21]
    check(kernels, inputs, config=config)


def make_unions(kernels, lists: list[list[int]], num_topk: int) -> list[list[int] | None]:
    return launch_unions(
        kernels.union_launcher(), kernels.get_union_specs(len(lists), num_topk), lists, num_topk, "cuda"
    )


@pytest.mark.parametrize("seed", range(50))
def test_unions_hold_both_lists(kernels, seed):
    """Each token's rows, as often as it lists them; the last token may be alone."""
    draw = random.Random(seed)
    rows = [-1, *range(12), 2**26]
    lists = [draw.choices(rows, k=draw.randint(0, 16)) for _ in range(draw.randint(1, 4))]
    for pair, union in enumerate(make_unions(kernels, lists, 16)):
        assert_joined(union, lists[2 * pair : 2 * pair + 2])


@pytest.mark.parametrize("num_topk", [512, 2000, 2048, 2176])
def test_shared_rows_have_one_entry(kernels, num_topk):
    rows = torch.randperm(120_000)[: num_topk + 100].tolist()
    for _ in range(20):  # what a launch leaves in shared memory is the next one's start
        union = make_unions(kernels, [rows[:num_topk], rows[:99:-1]], num_topk)[0]
        # Few rows are lost to collisions in both hash tables.
        assert num_topk + 100 <= len(union) <= (num_topk + 100) * 1.03
        assert {entry >> 2 for entry in union} == set(rows)


def test_scratch_may_hold_anything(kernels, configs):
    """Launches of several sizes, one after the other, through the scratch that the backend reserves."""
    capability = torch.cuda.get_device_capability()
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    specs = configs.get_workspace_specs(1000, 8, 512, num_sms, torch.float16, configs.KVFormat.MODEL, capability)
    workspace = [torch.full(shape, -1, dtype=dtype, device="cuda") for shape, dtype in specs]
    for scratch in workspace[:2]:
        scratch.fill_(float("nan"))
    for num_tokens in (1, 1000, 33, 401, 2):
        counts = [max(512 - token, 0) for token in range(num_tokens)]
        inputs = gpu_inputs(counts, 8, torch.float16, num_topk=512, num_rows=700)
        check(kernels, inputs, workspace=workspace, is_prefill=num_tokens > 256)


@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_unused_rows_may_hold_nan(kernels, kv_format, num_splits):
    inputs = gpu_inputs([2000, 63, 0], 8, torch.float16, kv_format=kv_format)
    used = torch.cat([row[:n] for row, n in zip(inputs.topk, inputs.valid_count, strict=True)]).long()
    unused = torch.ones(NUM_ROWS, dtype=torch.bool, device="cuda")
    unused[used] = False
    inputs.kv[unused] = float("nan") if kv_format == "16-bit" else 0xFF
    check(kernels, inputs, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 8])
def test_entries_below_zero_are_skipped(kernels, num_splits):
    inputs = gpu_inputs([2048, 2048, 500], 8, torch.float16)
    inputs.topk[0, 100:900] = -1
    inputs.topk[1, ::2] = -1
    inputs.topk[2] = -1
    check(kernels, inputs, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 8])
def test_strided_query(kernels, num_splits):
    inputs = gpu_inputs([2048, 700, 5], 20, torch.float16)
    expected = attention(kernels, inputs, num_splits=num_splits)
    inputs.q_nope = inputs.q_nope.transpose(0, 1).contiguous().transpose(0, 1)
    assert not inputs.q_nope.is_contiguous()
    result = attention(kernels, inputs, num_splits=num_splits)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    q = torch.cat((inputs.q_nope, inputs.q_pe), dim=-1)
    inputs.q_nope, inputs.q_pe = q[..., :RANK], q[..., RANK:]
    result = attention(kernels, inputs, num_splits=num_splits)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("is_prefill", [False, True])
def test_rows_past_two_to_the_31_elements(kernels, is_prefill, kv_format):
    inputs = gpu_inputs([2048, 70] * (128 if is_prefill else 1), 8, torch.float16, kv_format=kv_format, num_rows=3000)
    width = inputs.kv.shape[1]
    first = 2**31 // width + 1
    cache = torch.empty((first + 3000, width), dtype=inputs.kv.dtype, device="cuda")
    cache[first:] = inputs.kv
    inputs.kv = cache
    inputs.topk[inputs.topk >= 0] += first
    check(kernels, inputs, is_prefill=is_prefill)


def test_graph_replay_follows_new_indices_and_lengths(kernels, configs):
    """A captured launch reads the lists when it is replayed; padded tokens are empty."""
    captured = gpu_inputs([2048] * 4, 8, torch.float16)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    capability = torch.cuda.get_device_capability()
    specs = configs.get_workspace_specs(4, 8, NUM_TOPK, num_sms, torch.float16, configs.KVFormat.MODEL, capability)
    workspace = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for shape, dtype in specs[:2]]

    attention(kernels, captured, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention(kernels, captured, workspace=workspace)
    for seed, counts in enumerate([[2048, 1, 700, 64], [5, 2047, 0, 0], [0, 0, 0, 0]], start=1):
        replayed = gpu_inputs(counts, 8, torch.float16, seed=seed)
        for name, value in vars(replayed).items():
            if isinstance(value, torch.Tensor):
                getattr(captured, name).copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        assert_matches_reference(out, lse, replayed)
        first = out.clone(), lse.clone()
        for _ in range(20):
            graph.replay()
            assert torch.equal(out, first[0]), "replays must agree to the bit"
            assert torch.equal(lse, first[1])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("num_heads", [8, 16, 64])
@pytest.mark.parametrize("rope_dim", [64, 0])
def test_warmup_compiles_every_variant(kernels, configs, num_heads, rope_dim, kv_format, monkeypatch):
    """After the warm-up that the backend registers, no launch compiles anything."""
    import triton

    dtype = torch.float16
    kv = configs.KVFormat(kv_format)
    reachable = configs.get_reachable_configs(num_heads, kv, torch.cuda.get_device_capability())
    launchers = {kernels.attention_launcher(config) for config in reachable}
    for launcher in (*launchers, kernels.sparse_mla, kernels.merge_splits, kernels.union_launcher()):
        launcher.kernel.device_caches.clear()
    for config in reachable:
        kernels.attention_launcher(config).warmup(
            num_heads=num_heads, dtype=dtype, kv_format=kv, has_rope=rope_dim > 0, config=config
        )
    kernels.merge_splits.warmup(dtype=dtype, launch_pdl=config.launch_pdl)
    kernels.union_launcher().warmup(num_topk=64)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, repr, **_: compiled.append(repr))
    for num_tokens in [1, 2, 3, 16, 17, 31, 64, 100, 128, 257, 600]:
        inputs = gpu_inputs([64] * num_tokens, num_heads, dtype, num_topk=64, rope_dim=rope_dim, kv_format=kv_format)
        inputs.q_nope = inputs.q_nope.transpose(0, 1).contiguous().transpose(0, 1)
        for is_prefill in (False, True):
            attention(kernels, inputs, is_prefill=is_prefill)
    assert not compiled
    attention(kernels, inputs, config=configs.SparseMLAConfig(16, 16, 4, 1, programs_per_sm=1))
    assert compiled, "the hook sees a compilation"


def test_reference_agrees_across_devices():
    """The reference on the GPU, which the other tests use, against the CPU."""
    inputs = gpu_inputs([100, 3], 8, torch.float16)
    on_cpu = Inputs(*(value.cpu() for value in list(inputs)[:5]))
    for result, expected in zip(sparse_mla_reference(inputs), sparse_mla_reference(on_cpu), strict=True):
        torch.testing.assert_close(result.cpu(), expected)
