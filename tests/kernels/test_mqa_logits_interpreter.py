"""The MQA logits kernels against the float64 reference, in Triton's interpreter on the CPU.

The `check_` functions run in the interpreter process. Both forms of the operands run there: e4m3 as it is and, with
the assembly's integer twin, decoded to float16.
"""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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

SOFTWARE = pytest.mark.parametrize("software", [True, False], ids=["software", "native"])


def kernels():
    return load_overlay("vllm.v1.attention.ops.triton_mqa_logits")


def configs():
    return load_overlay("vllm.v1.attention.ops.triton_mqa_logits_config")


def nan_logits(q: torch.Tensor, num_tokens: int, width: int) -> torch.Tensor:
    """What the kernels write into, with a margin: whatever stays NaN was not written."""
    return torch.full((num_tokens + 1, width + 5), float("nan"))[:num_tokens, :width]


def contiguous(inputs: Contiguous, software: bool = True, **options) -> torch.Tensor:
    config = configs().get_contiguous_config(inputs.q.shape[1], (8, 0), software)
    with patch.object(kernels(), "_new_logits", nan_logits):
        return kernels().mqa_logits(*inputs, config=replace(config, **options))


def paged(
    inputs: Paged, software: bool = True, num_slots: int = 3, indices: torch.Tensor | None = None, **options
) -> torch.Tensor:
    schedule = kernels().paged_mqa_schedule(inputs.context_lens, inputs.kv_cache.shape[1], num_slots, indices)
    config = configs().get_paged_config(inputs.q.shape[2], (8, 0), software)
    with patch.object(kernels(), "_new_logits", nan_logits):
        return kernels().paged_mqa_logits(
            inputs.q,
            inputs.kv_cache,
            inputs.weights,
            inputs.context_lens,
            inputs.block_tables,
            schedule,
            inputs.max_model_len,
            indices=indices,
            config=replace(config, **options),
        )


def assert_exact_extent(logits: torch.Tensor, expected: list[torch.Tensor]) -> None:
    """The right values, and no other column written."""
    assert_logits(logits, expected)
    memory = logits._base
    for row, own in zip(memory, [*expected, ()], strict=True):
        assert torch.isnan(row[len(own) :]).all()


def check_contiguous(bounds: list[tuple[int, int]], num_heads: int, software: bool, head_dim: int = 128) -> None:
    num_keys = max(end for _, end in bounds)
    inputs = make_contiguous(bounds, num_keys, num_heads, head_dim=head_dim)
    assert_exact_extent(contiguous(inputs, software), inputs.expected())


@SOFTWARE
@pytest.mark.parametrize("num_heads", [16, 32, 64, 128])
def test_contiguous_any_head_count(interpreter, num_heads, software):
    """Token counts that do not fill a group, and keys that do not fill a tile."""
    bounds = [(0, 1 + 30 * token) for token in range(5)]
    interpreter.submit(check_contiguous, bounds, num_heads, software).result()


@pytest.mark.parametrize("head_dim", [32, 64])
def test_contiguous_any_head_dim(interpreter, head_dim):
    interpreter.submit(check_contiguous, [(0, 40), (3, 130)], 32, True, head_dim).result()


@SOFTWARE
def test_contiguous_windows_of_several_requests(interpreter, software):
    """Neighbours whose keys lie apart, in any order, some without keys."""
    bounds = [(0, 10), (1500, 1600), (700, 701), (5, 5), (0, 0), (1290, 1420), (0, 129), (128, 256), (1000, 400)]
    bounds = [(start, max(start, end)) for start, end in bounds]
    interpreter.submit(check_contiguous, bounds, 32, software).result()


def test_contiguous_no_token_has_keys(interpreter):
    interpreter.submit(check_contiguous, [(0, 0), (7, 7), (7, 7)], 16, True).result()


def check_several_parts(keys_per_program: int) -> None:
    """Also parts that no token of the group sees, and fewer programs than parts."""
    inputs = make_contiguous([(0, 300), (1700, 1900), (1800, 1801)], 1900, 32)
    with patch.object(kernels(), "_MIN_PROGRAMS", 1):
        logits = contiguous(inputs, keys_per_program=keys_per_program, block_q=128, block_n=64)
    assert_exact_extent(logits, inputs.expected())


@pytest.mark.parametrize("keys_per_program", [64, 128, 2048])
def test_contiguous_parts(interpreter, keys_per_program):
    interpreter.submit(check_several_parts, keys_per_program).result()


def check_bounds_are_kept() -> None:
    """Ends past the keys or past the width of the result are cut."""
    inputs = make_contiguous([(0, 200), (150, 200)], 200, 16)
    whole = inputs.expected()
    inputs.ke += 50
    inputs.max_seqlen_k = 130
    assert_exact_extent(contiguous(inputs), [row[:130] for row in whole])


def test_contiguous_ends_are_cut(interpreter):
    interpreter.submit(check_bounds_are_kept).result()


def check_strides() -> None:
    inputs = make_contiguous([(0, 100), (20, 90), (0, 0)], 100, 32)
    expected = inputs.expected()
    wide = torch.full((100, 160), 0x7F, dtype=torch.uint8)
    wide[:, :128] = inputs.k.view(torch.uint8)
    inputs.k = wide.view(torch.float8_e4m3fn)[:, :128]
    inputs.q = inputs.q.transpose(0, 1).contiguous().transpose(0, 1)
    inputs.weights = torch.cat((inputs.weights, inputs.weights), dim=1)[:, :32]
    assert not any(tensor.is_contiguous() for tensor in (inputs.q, inputs.k, inputs.weights))
    assert_exact_extent(contiguous(inputs), expected)


def test_contiguous_strided_inputs(interpreter):
    interpreter.submit(check_strides).result()


def check_relu_zeros_and_ties(software: bool) -> None:
    inputs = make_contiguous([(0, 128)] * 3, 128, 32)
    inputs.q = inputs.q.float().abs().to(torch.float8_e4m3fn)
    k = inputs.k.float().abs()
    k[:40] *= -1  # every product is negative
    k[40:50] = 0
    k[60:70] = k[50:60]
    inputs.k = k.to(torch.float8_e4m3fn)
    inputs.k_scale[60:70] = inputs.k_scale[50:60]
    logits = contiguous(inputs, software)
    assert (logits[:, :50] == 0).all()
    assert (logits[:, 50:128] != 0).all()
    assert torch.equal(logits[:, 60:70], logits[:, 50:60])
    assert_exact_extent(logits, inputs.expected())


@SOFTWARE
def test_relu_exact_zeros_and_ties(interpreter, software):
    interpreter.submit(check_relu_zeros_and_ties, software).result()


def check_large_values(software: bool) -> None:
    """Products beyond the range of float16, and the smallest numbers of e4m3."""
    inputs = make_contiguous([(0, 64)] * 2, 64, 16)
    signs = torch.where(inputs.k.float() < 0, -1.0, 1.0)
    inputs.k = (signs * 448).to(torch.float8_e4m3fn)
    inputs.q = (inputs.q.float() * 400).clamp(-448, 448).to(torch.float8_e4m3fn)
    inputs.k[32:] = (signs[32:] * 2.0**-9).to(torch.float8_e4m3fn)
    assert_logits(contiguous(inputs, software)[:, :32], [row[:32] for row in inputs.expected()])
    assert_logits(contiguous(inputs, software)[:, 32:], [row[32:] for row in inputs.expected()])


@SOFTWARE
def test_the_whole_range_of_e4m3(interpreter, software):
    interpreter.submit(check_large_values, software).result()


def check_paged(context_lens, num_heads: int, software: bool, num_slots: int, **options) -> None:
    config = {name: options.pop(name) for name in ("block_n", "block_q") if name in options}
    inputs = make_paged(context_lens, num_heads, **options)
    assert_exact_extent(paged(inputs, software, num_slots, **config), inputs.expected())


@SOFTWARE
@pytest.mark.parametrize("num_heads", [16, 32, 64, 128])
def test_paged_any_head_count(interpreter, num_heads, software):
    interpreter.submit(check_paged, [130, 1], num_heads, software, 2).result()


@SOFTWARE
@pytest.mark.parametrize("block_size", [32, 64])
def test_paged_lengths_around_the_block_edges(interpreter, block_size, software):
    """Shares that begin inside a request, requests without keys, and lengths below 0 as padding may leave them."""
    lengths = [0, 1, 31, 33, 63, 64, -2, 65, 0, 190, 0, 0]
    interpreter.submit(check_paged, lengths, 16, software, 4, block_size=block_size).result()


@pytest.mark.parametrize("num_slots", [1, 3, 40])
def test_paged_any_number_of_slots(interpreter, num_slots):
    interpreter.submit(check_paged, [200, 70], 16, True, num_slots).result()


@pytest.mark.parametrize(("block_size", "block_n"), [(32, 128), (64, 128), (32, 32)])
def test_paged_tiles_of_several_blocks(interpreter, block_size, block_n):
    args = [300, 97, 33], 16, True, 3
    interpreter.submit(check_paged, *args, block_size=block_size, block_n=block_n).result()


@pytest.mark.parametrize("head_dim", [32, 64])
def test_paged_any_head_dim(interpreter, head_dim):
    interpreter.submit(check_paged, [70, 3], 32, True, 2, head_dim=head_dim).result()


@pytest.mark.parametrize("block_q", [16, 64])
@pytest.mark.parametrize("next_n", [2, 3, 4])
def test_paged_several_tokens_a_request(interpreter, next_n, block_q):
    """All in one tile, or in several groups; the first request is shorter than its tokens."""
    args = [next_n - 1, 66, 0, 129], 16, True, 3
    interpreter.submit(check_paged, *args, next_n=next_n, block_q=block_q).result()


def test_paged_lengths_in_any_order(interpreter):
    """Under decode context parallelism a rank's share of a context need not grow with the token."""
    interpreter.submit(check_paged, [[70, 65], [64, 64], [0, 3]], 16, True, 2, next_n=2).result()


def check_one_length_a_request(dimensions: int) -> None:
    inputs = make_paged([70, 130], 16, next_n=3)
    last = inputs.context_lens[:, -1].contiguous()
    inputs.context_lens = last[:, None]
    expected = inputs.expected()
    inputs.context_lens = last if dimensions == 1 else last[:, None]
    assert_exact_extent(paged(inputs), expected)


@pytest.mark.parametrize("dimensions", [1, 2])
def test_paged_one_length_for_all_tokens_of_a_request(interpreter, dimensions):
    interpreter.submit(check_one_length_a_request, dimensions).result()


def check_flattened_rows() -> None:
    """Each token as a row of its own, with its request's number: the same logits as together."""
    inputs = make_paged([5, 70, 130], 16, next_n=2)
    expected = inputs.expected()
    indices = torch.arange(3, dtype=torch.int32).repeat_interleave(2)
    flat = replace(
        inputs,
        q=inputs.q.flatten(0, 1)[:, None],
        context_lens=inputs.context_lens.view(-1, 1),
        block_tables=inputs.block_tables.repeat_interleave(2, dim=0),
    )
    assert_exact_extent(paged(flat, indices=indices), expected)


def test_paged_flattened_rows(interpreter):
    interpreter.submit(check_flattened_rows).result()


def check_packed_blocks() -> None:
    """Blocks of several layers side by side: a block stride larger than a block, NaN between."""
    inputs = make_paged([70, 200], 16)
    expected = inputs.expected()
    blocks, block_size, _, width = inputs.kv_cache.shape
    packed = torch.full((blocks, block_size * width + 4096), 0xFF, dtype=torch.uint8)
    packed[:, : block_size * width] = inputs.kv_cache.view(blocks, -1)
    inputs.kv_cache = packed.as_strided(inputs.kv_cache.shape, (packed.shape[1], width, width, 1))
    assert_exact_extent(paged(inputs), expected)


def test_paged_block_stride_larger_than_a_block(interpreter):
    interpreter.submit(check_packed_blocks).result()


def check_blocks_past_int32() -> None:
    inputs = make_paged([70, 1], 16)
    expected = inputs.expected()
    block_bytes = inputs.kv_cache[0].numel()
    first = 2**31 // block_bytes + 1
    # Only the pages that are written take memory.
    cache = torch.empty((first + len(inputs.kv_cache), *inputs.kv_cache.shape[1:]), dtype=torch.uint8)
    cache[first:] = inputs.kv_cache
    inputs.kv_cache = cache
    inputs.block_tables += first
    assert_exact_extent(paged(inputs), expected)


def test_paged_blocks_past_two_to_the_31_bytes(interpreter):
    interpreter.submit(check_blocks_past_int32).result()


def check_context_is_cut() -> None:
    """A length past the width of the result, which only padding can have."""
    inputs = make_paged([200, 5], 16, max_model_len=150)
    assert_exact_extent(paged(inputs), [row[:150] for row in inputs.expected()])


def test_paged_lengths_past_the_width_are_cut(interpreter):
    interpreter.submit(check_context_is_cut).result()


def check_rows_are_aligned(width: int) -> None:
    k = kernels()
    inputs = make_contiguous([(0, width)], width, 16)
    config = configs().get_contiguous_config(16, (8, 0), True)
    logits = k.mqa_logits(*inputs, config=config)
    assert logits.shape == (1, width)
    assert logits.stride(0) % 64 == 0
    assert logits.stride(1) == 1


@pytest.mark.parametrize("width", [1, 64, 65])
def test_rows_begin_where_the_top_k_kernels_want_them(interpreter, width):
    interpreter.submit(check_rows_are_aligned, width).result()


def check_nothing_to_do() -> None:
    k = kernels()
    config = configs().get_contiguous_config(16, (8, 0), True)
    inputs = make_contiguous([(0, 9)], 9, 16)
    empty = replace(inputs, q=inputs.q[:0], weights=inputs.weights[:0], ks=inputs.ks[:0], ke=inputs.ke[:0])
    assert k.mqa_logits(*empty, config=config).shape == (0, 9)
    assert k.mqa_logits(*replace(inputs, max_seqlen_k=0), config=config).shape == (1, 0)


def test_no_tokens_or_no_columns(interpreter):
    interpreter.submit(check_nothing_to_do).result()


def walk(schedule: list[tuple[int, int]], blocks: list[int]) -> list[list[tuple[int, int]]]:
    """Return the (row, block) pairs of each slot, as the kernel walks over them."""
    slots = []
    for (first_row, first_block), (last_row, end_block) in pairwise(schedule):
        slots.append([])
        for row in range(first_row, last_row + (end_block > 0)):
            start = first_block if row == first_row else 0
            end = min(end_block, blocks[row]) if row == last_row else blocks[row]
            slots[-1] += [(row, block) for block in range(start, end)]
    return slots


def make_schedule(lengths: list[list[int]], block_size: int, num_slots: int) -> list[tuple[int, int]]:
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    with patch.object(kernels(), "_SCHEDULE_ROWS", 8):  # several passes over the rows
        schedule = kernels().paged_mqa_schedule(context_lens, block_size, num_slots)
    assert schedule.dtype == torch.int32
    assert schedule.shape == (num_slots + 1, 2)
    return [tuple(row) for row in schedule.tolist()]


LENGTHS = st.integers(-3, 300) | st.sampled_from([0, 0, 63, 64, 65])


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    next_n=st.integers(1, 3),
    num_rows=st.integers(1, 20),
    block_size=st.sampled_from([32, 64]),
    num_slots=st.integers(1, 9),
)
def test_schedule_shares_every_block_once_and_equally(interpreter, data, next_n, num_rows, block_size, num_slots):
    row = st.lists(LENGTHS, min_size=next_n, max_size=next_n)
    lengths = data.draw(st.lists(row, min_size=num_rows, max_size=num_rows), "lengths")
    schedule = interpreter.submit(make_schedule, lengths, block_size, num_slots).result()
    blocks = [-(-max(*row, 0) // block_size) for row in lengths]
    slots = walk(schedule, blocks)
    every = [(row, block) for row, count in enumerate(blocks) for block in range(count)]
    assert [pair for slot in slots for pair in slot] == every
    assert max(map(len, slots)) - min(map(len, slots)) <= 1
    # Nobody passes over the empty rows at the end of a padded batch.
    last_used = max((row for row, count in enumerate(blocks) if count), default=0)
    assert all(first_row <= last_used for first_row, _ in schedule)


def test_schedule_of_many_long_contexts(interpreter):
    """Their blocks times the slots pass 2^31."""
    schedule = interpreter.submit(make_schedule, [[2**27], [2**27]], 1, 10).result()
    starts = [row * 2**27 + block for row, block in schedule]
    shares = [end - start for start, end in pairwise(starts)]
    assert sum(shares) == 2**28
    assert max(shares) - min(shares) <= 1


def check_refuses(change: str, message: str) -> None:
    inputs = make_contiguous([(0, 9)], 9, 16)
    if change == "heads":
        inputs.q, inputs.weights = inputs.q[:, :8], inputs.weights[:, :8]
    elif change == "head dimension":
        inputs.q, inputs.k = inputs.q[..., :96], inputs.k[..., :96]
    elif change == "query dtype":
        inputs.q = inputs.q.to(torch.bfloat16)
    elif change == "weights dtype":
        inputs.weights = inputs.weights.bfloat16()
    elif change == "weights rows":
        inputs.weights = inputs.weights[:0]
    elif change == "key width":
        inputs.k = inputs.k[:, :64]
    elif change == "key stride":
        inputs.k = torch.zeros(9, 136, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :128]
    with pytest.raises(ValueError, match=message):
        contiguous(inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("heads", "16, 32, 64 or 128 heads.*got 8 and 128"),
        ("head dimension", "head dimension of 32, 64 or 128, got 16 and 96"),
        ("query dtype", "query in float8_e4m3fn, got torch.bfloat16"),
        ("weights dtype", "fp32 weights.*got torch.bfloat16"),
        ("weights rows", r"weights \[1, 16\] for this query, got \[0, 16\]"),
        ("key width", "keys of 128 bytes"),
        ("key stride", r"aligned to 16, got .* strides \(136, 1\)"),
    ],
)
def test_refuses_inputs_it_cannot_serve(interpreter, change, message):
    interpreter.submit(check_refuses, change, message).result()


def check_refuses_block_size() -> None:
    with pytest.raises(ValueError, match=r"tiles of 64 keys need blocks .* got 128"):
        paged(make_paged([70], 16, block_size=128))


def test_refuses_blocks_larger_than_a_tile(interpreter):
    interpreter.submit(check_refuses_block_size).result()


def test_reference_is_the_formula():
    """The reference itself, summed term by term, and the layout of the cache."""
    inputs = make_contiguous([(2, 5)], 6, 16, head_dim=32)
    (logits,) = inputs.expected()
    for n in range(2, 5):
        total = 0.0
        for h in range(16):
            product = float(inputs.q[0, h].double() @ inputs.k[n].double())
            total += float(inputs.weights[0, h]) * max(product, 0.0)
        assert float(logits[n - 2]) == pytest.approx(total * float(inputs.k_scale[n]), rel=1e-9)
    cache = make_paged([70], 16, block_size=32)
    block = cache.kv_cache[cache.block_tables[0, 1].long()].flatten()
    k, k_scale = read_blocks(cache.kv_cache[cache.block_tables[0, :3].long()], 128)
    assert torch.equal(k[33].view(torch.uint8), block[128:256])
    assert torch.equal(k_scale[33:34].view(torch.uint8), block[32 * 128 + 4 : 32 * 128 + 8])
    expected = score(cache.q[0], k, k_scale, cache.weights[:1])[0, :70]
    torch.testing.assert_close(cache.expected()[0], expected)
