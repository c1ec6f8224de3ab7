"""The sparse MLA kernel against the float64 reference, in Triton's interpreter on the CPU.

The `check_` functions run in the interpreter process. Only float16: the
interpreter multiplies bfloat16 operands of `tl.dot` as integers.
"""

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


def kernels():
    return load_overlay("vllm.v1.attention.ops.triton_mla_sparse")


def attention(inputs: Inputs, num_splits: int = 1, **options):
    return kernels().sparse_mla_attention(*inputs, num_splits=num_splits, **options)


def check_matches_reference(counts: list[int], num_heads: int, num_topk: int, rope_dim: int, num_splits: int) -> None:
    inputs = make_inputs(counts, num_heads, num_topk, rope_dim=rope_dim)
    assert_matches_reference(*attention(inputs, num_splits), inputs)


@pytest.mark.parametrize("num_heads", [1, 8, 16, 20, 32, 40, 64, 72, 128])
def test_any_head_count(interpreter, num_heads):
    """Head counts that do and do not fill the head block of their configuration."""
    args = [70, 3], num_heads, 96, 64, 1
    interpreter.submit(check_matches_reference, *args).result()


@pytest.mark.parametrize("rope_dim", [64, 0])
@pytest.mark.parametrize("num_topk", [64, 100, 130])
def test_any_topk_with_and_without_rope(interpreter, num_topk, rope_dim):
    """Widths that are and are not multiples of the key block, full and nearly full."""
    args = [num_topk, num_topk - 1], 8, num_topk, rope_dim, 1
    interpreter.submit(check_matches_reference, *args).result()


@pytest.mark.parametrize("num_splits", [1, 4])
def test_counts_around_the_block_edges(interpreter, num_splits):
    args = [0, 1, 31, 63, 64, 65, 127, 128, 129, 130], 4, 130, 64, num_splits
    interpreter.submit(check_matches_reference, *args).result()


@pytest.mark.parametrize("num_splits", [1, 4])
def test_all_tokens_empty(interpreter, num_splits):
    args = [0, 0], 8, 64, 64, num_splits
    interpreter.submit(check_matches_reference, *args).result()


def check_split_equals_serial(num_splits: int) -> None:
    inputs = make_inputs([200, 130, 64, 1, 0], 2, 200)
    serial_out, serial_lse = attention(inputs)
    out, lse = attention(inputs, num_splits)
    torch.testing.assert_close(out, serial_out, rtol=0, atol=1e-3)
    torch.testing.assert_close(lse, serial_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_splits", [2, 4, 8, 16, 32])
def test_splits_equal_the_serial_kernel(interpreter, num_splits):
    """Also with more splits than key blocks, so that whole splits are empty."""
    interpreter.submit(check_split_equals_serial, num_splits).result()


def check_unused_rows_are_never_read(num_splits: int) -> None:
    inputs = make_inputs([70, 5, 0], 8, 96)
    used = torch.cat([row[:n] for row, n in zip(inputs.topk, inputs.valid_count, strict=True)]).long()
    unused = torch.ones(len(inputs.kv), dtype=torch.bool)
    unused[used] = False
    inputs.kv[unused] = float("nan")
    # Rows beyond the count belong to no token, whatever they name.
    poison = int(unused.nonzero()[0])
    for row, count in zip(inputs.topk, inputs.valid_count, strict=True):
        row[count:] = poison
    assert_matches_reference(*attention(inputs, num_splits), inputs)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_unused_rows_may_hold_nan(interpreter, num_splits):
    interpreter.submit(check_unused_rows_are_never_read, num_splits).result()


def check_skipped_entries() -> None:
    inputs = make_inputs([96, 96], 8, 96)
    inputs.topk[0, 10:75] = -1  # a whole key block and the edges of two others
    inputs.topk[1, ::2] = -1
    assert_matches_reference(*attention(inputs), inputs)


def test_entries_below_zero_are_skipped(interpreter):
    interpreter.submit(check_skipped_entries).result()


def check_strided_query() -> None:
    inputs = make_inputs([70, 96, 2], 20, 96)
    expected = attention(inputs)
    # Heads outermost, as a batched matrix product over heads leaves them.
    inputs.q_nope = inputs.q_nope.transpose(0, 1).contiguous().transpose(0, 1)
    assert not inputs.q_nope.is_contiguous()
    torch.testing.assert_close(attention(inputs), expected, rtol=0, atol=0)
    # Both parts as views of one tensor.
    q = torch.cat((inputs.q_nope, inputs.q_pe), dim=-1)
    inputs.q_nope, inputs.q_pe = q[..., :RANK], q[..., RANK:]
    torch.testing.assert_close(attention(inputs), expected, rtol=0, atol=0)


def test_strided_query(interpreter):
    interpreter.submit(check_strided_query).result()


def check_padded_rows() -> None:
    inputs = make_inputs([70, 96], 8, 96)
    expected = attention(inputs)
    padded = torch.full((len(inputs.kv), 640), float("nan"), dtype=inputs.kv.dtype)
    padded[:, : inputs.kv.shape[1]] = inputs.kv
    inputs.kv = padded[:, : inputs.kv.shape[1]]
    torch.testing.assert_close(attention(inputs), expected, rtol=0, atol=0)


def test_kv_row_stride_larger_than_the_row(interpreter):
    interpreter.submit(check_padded_rows).result()


def check_rows_past_int32() -> None:
    inputs = make_inputs([70, 5], 8, 96)
    width = inputs.kv.shape[1]
    first = 2**31 // width + 1
    # Only the pages that are written take memory.
    cache = torch.empty((first + len(inputs.kv), width), dtype=inputs.kv.dtype)
    cache[first:] = inputs.kv
    inputs.kv = cache
    inputs.topk[inputs.topk >= 0] += first
    assert_matches_reference(*attention(inputs), inputs)


def test_rows_past_two_to_the_31_elements(interpreter):
    interpreter.submit(check_rows_past_int32).result()


def check_large_scores() -> None:
    inputs = make_inputs([70, 96], 8, 96)
    # q . k reaches 1e5, beyond float16; softmax is close to one-hot.
    inputs.q_nope *= 60
    inputs.kv *= 60
    inputs.kv[:, RANK:] /= 60
    assert_matches_reference(*attention(inputs), inputs)


def test_scores_beyond_the_range_of_float16(interpreter):
    interpreter.submit(check_large_scores).result()


def check_given_workspace() -> None:
    num_sms, num_heads = 6, 20
    inputs = make_inputs([70, 5, 33], num_heads, 96)
    block_h = kernels().get_config(num_heads).block_h
    num_splits = kernels().get_num_splits(3, -(-num_heads // block_h), num_sms)
    assert num_splits > 1
    workspace = [torch.full(shape, float("nan")) for shape in kernels().get_workspace_shapes(num_heads, num_sms)]
    out = attention(inputs, num_splits, workspace=workspace)
    assert_matches_reference(*out, inputs)


def test_given_workspace(interpreter):
    interpreter.submit(check_given_workspace).result()


def check_split_policy() -> None:
    k = kernels()
    for num_sms in (48, 108, 132, 188):
        for num_heads in range(1, 129):
            num_head_blocks = -(-num_heads // k.get_config(num_heads).block_h)
            rows = k.get_workspace_shapes(num_heads, num_sms)[0][0]
            previous = k.MAX_SPLITS
            for num_tokens in range(1, 2 * num_sms):
                splits = k.get_num_splits(num_tokens, num_head_blocks, num_sms)
                assert splits in (1, 2, 4, 8, 16, 32)
                assert splits <= previous
                assert splits == 1 or num_tokens * num_heads * splits <= rows
                previous = splits
            assert k.get_num_splits(2 * num_sms, num_head_blocks, num_sms) == 1
    assert k.get_num_splits(1, 1, 132) == k.MAX_SPLITS


def test_splits_fit_the_workspace(interpreter):
    """More tokens never mean more splits, and the scratch holds every choice."""
    interpreter.submit(check_split_policy).result()


def check_refuses(change: str, message: str) -> None:
    inputs = make_inputs([4], 8, 64)
    if change == "dtype":
        inputs.kv = inputs.kv.bfloat16()
    elif change == "float32":
        for name in ("q_nope", "q_pe", "kv"):
            setattr(inputs, name, getattr(inputs, name).float())
    elif change == "rank":
        inputs.q_nope = inputs.q_nope[..., :256]
    elif change == "kv width":
        inputs.kv = inputs.kv[:, :RANK]
    with pytest.raises(ValueError, match=message):
        attention(inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dtype", "same 16-bit dtype"),
        ("float32", "same 16-bit dtype"),
        ("rank", "latent width of 512"),
        ("kv width", "the query needs 576"),
    ],
)
def test_refuses_inputs_it_cannot_serve(interpreter, change, message):
    interpreter.submit(check_refuses, change, message).result()


def test_reference_is_plain_attention():
    """The reference itself, against PyTorch's attention over the selected rows."""
    inputs = make_inputs([40], 4, 40, dtype=torch.float64)
    rows = inputs.kv[inputs.topk[0].long()]
    q = torch.cat((inputs.q_nope, inputs.q_pe), dim=-1)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[:, None], rows.expand(4, -1, -1), rows[:, :RANK].expand(4, -1, -1), scale=inputs.sm_scale
    )
    torch.testing.assert_close(sparse_mla_reference(inputs)[0][0], expected[:, 0])
