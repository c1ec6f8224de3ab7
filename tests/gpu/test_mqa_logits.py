"""The MQA logits kernels on a real GPU, against the float64 reference and DeepGEMM."""

import pytest
import torch

from tests.kernels.mqa_reference import (
    Contiguous,
    Paged,
    assert_logits,
    make_contiguous,
    make_paged,
    read_blocks,
    score,
)
from tests.kernels.overlay import load_overlay

pytestmark = pytest.mark.gpu

# The configurations of this GPU, and those of SM120 and SM80: the cards are not at hand.
FORMS = {"own": (None, False), "sm120": ((12, 0), False), "software": ((8, 0), True)}
NUM_SLOTS = 132


@pytest.fixture(scope="module")
def kernels():
    return load_overlay("vllm.v1.attention.ops.triton_mqa_logits")


@pytest.fixture(scope="module")
def configs():
    return load_overlay("vllm.v1.attention.ops.triton_mqa_logits_config")


@pytest.fixture(params=FORMS)
def form(request) -> tuple[tuple[int, int], bool]:
    """The capability whose configurations run, and whether e4m3 is computed in software."""
    own = torch.cuda.get_device_capability()
    capability, software = FORMS[request.param]
    if not software and own < (8, 9):
        pytest.skip("needs a GPU with e4m3 instructions, SM89 or newer")
    return capability or own, software


def contiguous(kernels, configs, form, inputs: Contiguous) -> torch.Tensor:
    config = configs.get_contiguous_config(inputs.q.shape[1], *form)
    return kernels.mqa_logits(*inputs, config=config)


def paged(kernels, configs, form, inputs: Paged, schedule: torch.Tensor | None = None) -> torch.Tensor:
    if schedule is None:
        schedule = kernels.paged_mqa_schedule(inputs.context_lens, inputs.kv_cache.shape[1], NUM_SLOTS)
    return kernels.paged_mqa_logits(
        inputs.q,
        inputs.kv_cache,
        inputs.weights,
        inputs.context_lens,
        inputs.block_tables,
        schedule,
        inputs.max_model_len,
        config=configs.get_paged_config(inputs.q.shape[2], *form),
    )


@pytest.mark.parametrize(("num_heads", "head_dim"), [(16, 128), (32, 128), (64, 128), (128, 128), (32, 64), (64, 32)])
def test_contiguous(kernels, configs, form, num_heads, head_dim):
    """A prefill of one request, then the rest of three others, some tokens without keys."""
    bounds = [(0, 900 + token) for token in range(90)] + [(990, 990), (0, 0)]
    bounds += [(990, 991 + token) for token in range(7)] + [(1000, 2500), (2400, 3000), (998, 999)]
    inputs = make_contiguous(bounds, 3000, num_heads, head_dim=head_dim, device="cuda")
    assert_logits(contiguous(kernels, configs, form, inputs), inputs.expected())


@pytest.mark.parametrize("num_tokens", [1, 3, 4096])
def test_contiguous_any_number_of_tokens(kernels, configs, form, num_tokens):
    """Few tokens over many keys are split into more programs."""
    bounds = [(7, 20_000 - num_tokens + token) for token in range(num_tokens)]
    inputs = make_contiguous(bounds, 20_000, 32, device="cuda")
    logits = contiguous(kernels, configs, form, inputs)
    for tokens in (slice(0, 5), slice(num_tokens - 1, num_tokens)):
        assert_logits(logits[tokens], inputs.expected(tokens))


def test_contiguous_slices_of_tokens(kernels, configs, form):
    """What a rank gets of a prefill whose rows are shared: pointers that are aligned to a number only."""
    inputs = make_contiguous([(5 * token, 700) for token in range(40)], 700, 16, device="cuda")
    expected = inputs.expected()[3:]
    for name in ("q", "weights", "ks", "ke"):
        setattr(inputs, name, getattr(inputs, name)[3:])
    assert inputs.ks.data_ptr() % 16
    assert_logits(contiguous(kernels, configs, form, inputs), expected)


def test_contiguous_keys_past_two_to_the_31_bytes(kernels, configs, form):
    first = 2**31 // 128 + 5
    inputs = make_contiguous([(0, 300), (100, 300), (250, 251)], 300, 32, device="cuda")
    expected = inputs.expected()
    k = torch.empty(first + 300, 128, dtype=torch.uint8, device="cuda")
    k[first:] = inputs.k.view(torch.uint8)
    k_scale = torch.empty(first + 300, device="cuda")
    k_scale[first:] = inputs.k_scale
    inputs.k, inputs.k_scale = k.view(torch.float8_e4m3fn), k_scale
    inputs.ks += first
    inputs.ke += first
    assert_logits(contiguous(kernels, configs, form, inputs), expected)


def test_contiguous_logits_past_two_to_the_31_elements(kernels, configs, form):
    num_tokens, width = 17_000, 130_000
    assert num_tokens * width > 2**31
    bounds = [(0, 0)] * (num_tokens - 3) + [(0, 1000), (2, 700), (0, 1000)]
    inputs = make_contiguous(bounds, 1000, 16, device="cuda")
    inputs.max_seqlen_k = width
    logits = contiguous(kernels, configs, form, inputs)
    assert_logits(logits[-3:], inputs.expected(slice(num_tokens - 3, num_tokens)))


LENGTHS = [0, 1, 63, 64, 65, 127, 5000, 129, 0, 2049, 31, 33, 0, 0]


@pytest.mark.parametrize(
    ("num_heads", "next_n", "block_size"),
    [
        *((32, next_n, 64) for next_n in (1, 2, 3, 4)),
        *((16, 4, 64), (64, 1, 64), (64, 2, 64), (64, 3, 64), (128, 1, 64)),
        *((32, 2, 32), (64, 1, 32)),
    ],
)
def test_paged(kernels, configs, form, num_heads, next_n, block_size):
    inputs = make_paged(LENGTHS, num_heads, next_n=next_n, block_size=block_size, device="cuda")
    assert_logits(paged(kernels, configs, form, inputs), inputs.expected())


@pytest.mark.parametrize("head_dim", [32, 64])
def test_paged_any_head_dim(kernels, configs, form, head_dim):
    inputs = make_paged(LENGTHS, 32, head_dim=head_dim, device="cuda")
    assert_logits(paged(kernels, configs, form, inputs), inputs.expected())


@pytest.mark.parametrize(("batch", "length"), [(1, 40_000), (700, 70), (2000, 1)])
def test_paged_any_batch(kernels, configs, form, batch, length):
    """One long context shared by all, many short ones, and more rows than the scheduler looks at in one go."""
    inputs = make_paged([length + row % 3 for row in range(batch)], 16, device="cuda")
    assert_logits(paged(kernels, configs, form, inputs), inputs.expected())


@pytest.mark.parametrize("num_slots", [1, 7, 188])
def test_paged_any_number_of_slots(kernels, configs, form, num_slots):
    inputs = make_paged(LENGTHS, 32, device="cuda")
    schedule = kernels.paged_mqa_schedule(inputs.context_lens, 64, num_slots)
    assert_logits(paged(kernels, configs, form, inputs, schedule), inputs.expected())


def test_paged_block_stride_larger_than_a_block(kernels, configs, form):
    inputs = make_paged(LENGTHS, 32, device="cuda")
    expected = inputs.expected()
    blocks, block_size, _, width = inputs.kv_cache.shape
    packed = torch.full((blocks, block_size * width + 4096), 0xFF, dtype=torch.uint8, device="cuda")
    packed[:, : block_size * width] = inputs.kv_cache.view(blocks, -1)
    inputs.kv_cache = packed.as_strided(inputs.kv_cache.shape, (packed.shape[1], width, width, 1))
    assert_logits(paged(kernels, configs, form, inputs), expected)


def test_paged_blocks_past_two_to_the_31_bytes(kernels, configs, form):
    inputs = make_paged([3000, 70], 32, device="cuda")
    expected = inputs.expected()
    first = 2**31 // inputs.kv_cache[0].numel() + 1
    shape = (first + len(inputs.kv_cache), *inputs.kv_cache.shape[1:])
    cache = torch.empty(shape, dtype=torch.uint8, device="cuda")
    cache[first:] = inputs.kv_cache
    inputs.kv_cache = cache
    inputs.block_tables += first
    assert_logits(paged(kernels, configs, form, inputs), expected)


def test_paged_logits_past_two_to_the_31_elements(kernels, configs, form):
    inputs = make_paged([0] * 126 + [70, 500], 16, max_model_len=17_000_000, device="cuda")
    assert 127 * inputs.max_model_len > 2**31
    assert_logits(paged(kernels, configs, form, inputs), inputs.expected())


@pytest.mark.parametrize("next_n", [1, 4])
def test_nothing_past_a_context_is_written(kernels, configs, form, next_n, monkeypatch):
    """Not even the rest of a block, and nothing for padded rows."""

    def nan_logits(q: torch.Tensor, num_tokens: int, width: int) -> torch.Tensor:
        return torch.full((num_tokens + 1, width + 5), float("nan"), device="cuda")[:num_tokens, :width]

    monkeypatch.setattr(kernels, "_new_logits", nan_logits)
    inputs = make_paged(LENGTHS, 32, next_n=next_n, device="cuda")
    expected = inputs.expected()
    logits = paged(kernels, configs, form, inputs)
    assert_logits(logits, expected)
    for row, own in zip(logits._base, [*expected, ()], strict=True):
        assert torch.isnan(row[len(own) :]).all()


def test_graph_replay_with_other_lengths(kernels, configs, form):
    """Schedule and logits in one CUDA graph, whose lengths, tables and padding change between replays."""
    batch, next_n = 9, 2
    inputs = make_paged([4000] * batch, 32, next_n=next_n, device="cuda")
    buffer = torch.zeros(NUM_SLOTS + 1, 2, dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        buffer.copy_(kernels.paged_mqa_schedule(inputs.context_lens, 64, NUM_SLOTS))
        return paged(kernels, configs, form, inputs, buffer)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    for lengths in ([4000] * 9, [1, 2, 3, 0, 0, 0, 0, 0, 0], [3000, 0, 64, 65, 63, 3999, 5, 0, 0], [0] * 9, [2] * 9):
        last = torch.tensor(lengths, dtype=torch.int32, device="cuda")[:, None]
        offsets = torch.arange(1 - next_n, 1, dtype=torch.int32, device="cuda")
        inputs.context_lens.copy_((last + offsets).clamp(min=0))
        inputs.block_tables.copy_(inputs.block_tables[torch.randperm(batch, device="cuda")])
        logits.fill_(float("nan"))
        graph.replay()
        assert_logits(logits, inputs.expected())


def deep_gemm():
    """DeepGEMM's own functions, whichever path the wrappers take."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("compared with DeepGEMM on SM90, whose kernels take these inputs")
    import vllm.utils.deep_gemm as module

    module._lazy_init()
    if module._fp8_fp4_mqa_logits_impl is None:
        pytest.skip("needs DeepGEMM")
    return module


@pytest.mark.parametrize("num_heads", [32, 64])
def test_contiguous_equals_deep_gemm(kernels, configs, form, num_heads):
    """As accurate as DeepGEMM, whose sums have the same few bits on SM90."""
    inputs = make_contiguous([(0, 3000 + token) for token in range(300)], 3300, num_heads, device="cuda")
    theirs = deep_gemm()._fp8_fp4_mqa_logits_impl(
        (inputs.q, None), (inputs.k, inputs.k_scale), inputs.weights, inputs.ks, inputs.ke, inputs.max_seqlen_k
    )
    ours = contiguous(kernels, configs, form, inputs)
    assert theirs.shape == ours.shape
    wanted = inputs.expected()
    assert_logits(theirs, wanted)
    assert_logits(ours, wanted)
    assert_logits(ours, [row[: len(own)].double() for row, own in zip(theirs, wanted, strict=True)])


@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_paged_equals_deep_gemm(kernels, configs, form, next_n):
    module = deep_gemm()
    inputs = make_paged([3000, 64, 700, 129], 32, next_n=next_n, device="cuda")
    inputs.block_tables.clamp_(max=len(inputs.kv_cache) - 1)
    slots = module._paged_mqa_logits_schedule_slots(NUM_SLOTS, next_n)
    schedule = module._get_paged_mqa_logits_metadata_impl(inputs.context_lens, 64, slots)
    theirs = module._fp8_fp4_paged_mqa_logits_impl(
        (inputs.q, None),
        inputs.kv_cache,
        inputs.weights,
        inputs.context_lens,
        inputs.block_tables,
        schedule,
        inputs.max_model_len,
    )
    ours = paged(kernels, configs, form, inputs)
    assert theirs.shape == ours.shape
    wanted = inputs.expected()
    assert_logits(theirs, wanted)
    assert_logits(ours, wanted)
    assert_logits(ours, [row[: len(own)].double() for row, own in zip(theirs, wanted, strict=True)])


def top(logits: torch.Tensor, count: int) -> set[int]:
    return set(logits.topk(count).indices.tolist())


def test_top_keys_are_those_of_the_reference(kernels, configs, form):
    """At least 99.9 % of the best 2048 on random data, and all of them where the values have gaps."""
    inputs = make_contiguous([(0, 60_000)] * 8, 60_000, 64, device="cuda")
    logits = contiguous(kernels, configs, form, inputs)
    same = sum(
        len(top(row, 2048) & top(own, 2048)) for row, own in zip(logits[:4], inputs.expected(slice(0, 4)), strict=True)
    )
    assert same >= 0.999 * 4 * 2048

    inputs.q = torch.ones(inputs.q.shape, device="cuda").to(torch.float8_e4m3fn)
    inputs.weights.fill_(1.0)
    best = torch.randperm(60_000, device="cuda")[:2048]
    k = -torch.ones(60_000, 128, device="cuda")
    k[best] = 1.0
    inputs.k, inputs.k_scale = k.to(torch.float8_e4m3fn), torch.ones(60_000, device="cuda")
    logits = contiguous(kernels, configs, form, inputs)
    assert all(top(row, 2048) == set(best.tolist()) for row in logits)
    assert (logits == 0).sum() == 8 * (60_000 - 2048)


def test_warm_up_compiles_all_that_is_launched(kernels):
    """With the configurations of this GPU; nothing is compiled by a call afterwards, whatever its sizes."""
    names = ("contiguous_logits", "paged_logits", "make_schedule")
    num_heads, head_dim = 64, 64
    capability = kernels._capability(), bool(kernels.SOFTWARE_E4M3)
    options = {
        "contiguous_logits": {"config": kernels.get_contiguous_config(num_heads, *capability)},
        "paged_logits": {
            "config": kernels.get_paged_config(num_heads, *capability),
            "block_sizes": (32, 64),
            "next_n": (1, 2, 3, 4),
        },
        "make_schedule": {},
    }
    for name in names:
        heads = {} if name == "make_schedule" else {"num_heads": num_heads, "head_dim": head_dim}
        owner = getattr(kernels, name)
        owner.compile_many(owner.get_warmup_keys(**heads, **options[name]))

    device = torch.cuda.current_device()

    def num_compiled() -> list[int]:
        return [len(getattr(kernels, name).kernel.device_caches[device][0]) for name in names]

    before = num_compiled()
    assert all(before)
    for num_tokens in (1, 2, 16, 33):
        inputs = make_contiguous(
            [(0, 48 + num_tokens)] * (num_tokens + 3), 100, num_heads, head_dim=head_dim, device="cuda"
        )
        for name in ("q", "weights", "ks", "ke"):
            setattr(inputs, name, getattr(inputs, name)[3:])
        kernels.mqa_logits(*inputs)
        for next_n in (1, 2, 3, 4):
            for block_size in (32, 64):
                paged_inputs = make_paged(
                    [num_tokens] * num_tokens,
                    num_heads,
                    head_dim=head_dim,
                    next_n=next_n,
                    block_size=block_size,
                    device="cuda",
                )
                schedule = kernels.paged_mqa_schedule(paged_inputs.context_lens, block_size, NUM_SLOTS)
                kernels.paged_mqa_logits(
                    paged_inputs.q,
                    paged_inputs.kv_cache,
                    paged_inputs.weights,
                    paged_inputs.context_lens,
                    paged_inputs.block_tables,
                    schedule,
                    paged_inputs.max_model_len,
                )
    assert num_compiled() == before


def test_every_e4m3_pattern(kernels, configs, form):
    """Keys of one number, against heads that see it and its opposite: its absolute value, exactly."""
    patterns = torch.tensor([p for p in range(256) if p & 0x7F != 0x7F], dtype=torch.uint8, device="cuda")
    inputs = make_paged([len(patterns)], 16, device="cuda")
    blocks = inputs.block_tables[0, :4].long()
    for index, block in enumerate(blocks.tolist()):
        part = patterns[64 * index : 64 * (index + 1)]
        values = torch.zeros(64, 128, dtype=torch.uint8, device="cuda")
        values[: len(part), 17] = part
        inputs.kv_cache[block].view(-1)[: 64 * 128] = values.view(-1)
    q = torch.zeros(inputs.q.shape, device="cuda")
    q[..., 3, 17], q[..., 4, 17] = 1.0, -1.0
    inputs.q = q.to(torch.float8_e4m3fn)
    inputs.weights.fill_(1.0)
    k, k_scale = read_blocks(inputs.kv_cache[blocks], 128)
    wanted = score(inputs.q[0], k, k_scale, inputs.weights)[0, : len(patterns)]
    logits = paged(kernels, configs, form, inputs)[0, : len(patterns)]
    torch.testing.assert_close(logits, wanted.float(), rtol=0, atol=0)
