"""The sparse MLA kernel against the float64 reference, in Triton's interpreter on the CPU.

The `check_` functions run in the interpreter process; those about the table, of
which the interpreter sees nothing, in one that compiles. Only float16: the
interpreter multiplies bfloat16 operands of `tl.dot` as integers.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.overlay import load_overlay
from tests.kernels.reference import (
    RANK,
    Inputs,
    assert_matches_reference,
    join_lists,
    make_inputs,
    poison_unused_rows,
    share_rows,
    sparse_mla_reference,
)

KV_FORMATS = ["16-bit", "fp8_e4m3", "fp8_ds_mla"]


def kernels():
    return load_overlay("vllm.v1.attention.ops.triton_mla_sparse")


def configs():
    return load_overlay("vllm.v1.attention.ops.triton_mla_sparse_config")


def attention(inputs: Inputs, num_splits: int = 1, **options):
    return kernels().sparse_mla_attention(*inputs, kv_scale=inputs.kv_scale, num_splits=num_splits, **options)


def check_matches_reference(
    counts: list[int], num_heads: int, num_topk: int, rope_dim: int, num_splits: int, kv_format: str = "16-bit"
) -> None:
    inputs = make_inputs(counts, num_heads, num_topk, rope_dim=rope_dim, kv_format=kv_format)
    assert_matches_reference(*attention(inputs, num_splits), inputs)


@pytest.mark.parametrize("num_heads", [1, 4, 8, 11, 16, 20, 22, 32, 64, 72, 128])
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


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("rope_dim", [64, 0])
@pytest.mark.parametrize("kv_format", KV_FORMATS[1:])
def test_fp8_formats(interpreter, kv_format, rope_dim, num_splits):
    args = [100, 33, 0], 8, 100, rope_dim, num_splits, kv_format
    interpreter.submit(check_matches_reference, *args).result()


def check_every_e4m3_pattern(kv_format: str) -> None:
    """A list of one row makes the output that row."""
    inputs = make_inputs([1], 8, 64, kv_format=kv_format)
    finite = torch.tensor([pattern for pattern in range(256) if pattern & 0x7F != 0x7F], dtype=torch.uint8)
    row = inputs.kv[inputs.topk[0, 0]]
    row[: len(finite)] = finite
    if kv_format == "fp8_e4m3":
        inputs.kv_scale.fill_(0.5)
    expected = sparse_mla_reference(inputs)[0].to(torch.float16)
    torch.testing.assert_close(attention(inputs)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("kv_format", KV_FORMATS[1:])
def test_every_e4m3_pattern_is_exact(interpreter, kv_format):
    interpreter.submit(check_every_e4m3_pattern, kv_format).result()


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


@pytest.mark.parametrize("num_splits", [2, 5, 8, 32])
def test_splits_equal_the_serial_kernel(interpreter, num_splits):
    """Also with more splits than key blocks, so that whole splits are empty."""
    interpreter.submit(check_split_equals_serial, num_splits).result()


def check_unused_rows_are_never_read(num_splits: int) -> None:
    inputs = make_inputs([70, 5, 0], 8, 96)
    poison_unused_rows(inputs)
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


def check_programmatic_launch(is_programmatic: bool) -> None:
    c = configs()
    config = dataclasses.replace(c.get_config(8, 8, c.KVFormat.MODEL, (12, 0)), launch_pdl=is_programmatic)
    inputs = make_inputs([8], 8, 8)
    _, arguments = kernels().attention_launch(inputs.q_nope, inputs.kv, inputs.topk, 1, c.KVFormat.MODEL, True, config)
    # A kernel that waits must be launched so, and one that is launched so must wait.
    assert arguments["launch_pdl"] == arguments["LAUNCH_PDL"] == is_programmatic


@pytest.mark.parametrize("is_programmatic", [False, True])
def test_a_kernel_that_is_launched_early_waits(interpreter, is_programmatic):
    interpreter.submit(check_programmatic_launch, is_programmatic).result()


def check_configurations() -> None:
    c = configs()
    for kv_format in c.KVFormat:
        for heads in (8, 64):
            assert not any(config.gluon for config in c.get_reachable_configs(heads, kv_format, (12, 0)))


def test_the_interpreter_gets_no_kernel_in_gluon(interpreter):
    interpreter.submit(check_configurations).result()


def check_given_workspace(num_tokens: int) -> None:
    """Scratch that holds NaN, and too many rows for this launch."""
    num_heads, num_topk, num_sms = 20, 96, 24
    inputs = make_inputs([70, 5, 33][:num_tokens], num_heads, num_topk)
    c = configs()
    config = c.get_config(num_tokens, num_heads, c.KVFormat.MODEL, (12, 0))
    num_splits = c.get_num_splits(num_tokens, num_heads, num_topk, config, num_sms)
    assert num_splits > 1
    specs = c.get_workspace_specs(8, num_heads, num_topk, num_sms, inputs.q_nope.dtype, c.KVFormat.MODEL, (12, 0))
    assert specs[0][1] == inputs.q_nope.dtype, "half of the bytes that fp32 takes"
    workspace = [torch.full(shape, float("nan"), dtype=dtype) for shape, dtype in specs]
    assert_matches_reference(*attention(inputs, num_splits, config=config, workspace=workspace), inputs)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_given_workspace(interpreter, num_tokens):
    interpreter.submit(check_given_workspace, num_tokens).result()


def pair_config():
    return configs().SparseMLAConfig(16, 32, 4, 2, programs_per_sm=1, group=2)


def check_pairs(counts: list[int], num_heads: int, num_splits: int, kv_format: str) -> None:
    inputs = make_inputs(counts, num_heads, 64, num_rows=80, kv_format=kv_format)
    # A row that one token lists twice counts twice, whether the other has it or not.
    inputs.topk[0, 3] = inputs.topk[0, 4]
    inputs.topk[1, 5] = inputs.topk[1, 6] = inputs.topk[0, 7]
    inputs.topk[0, 9] = -1
    kernels().union_launcher = lambda: join_lists
    out = attention(inputs, num_splits, config=pair_config())
    assert_matches_reference(*out, inputs)


@pytest.mark.parametrize("kv_format", ["16-bit", "fp8_ds_mla"])
@pytest.mark.parametrize(
    ("counts", "num_heads", "num_splits"),
    [([64, 60], 8, 1), ([20, 64, 0, 33, 10], 5, 1), ([64, 8, 0, 0], 8, 3)],
)
def test_pairs_of_tokens(interpreter, counts, num_heads, num_splits, kv_format):
    """Two tokens a program, over the union of their lists; the last token may be alone."""
    interpreter.submit(check_pairs, counts, num_heads, num_splits, kv_format).result()


def check_tokens_left_alone(num_splits: int) -> None:
    inputs = make_inputs([64, 64, 50, 64, 7], 8, 64, num_rows=1000)
    share_rows(inputs)
    launches = []

    def join(*args) -> None:
        join_lists(*args)
        launches.append([counts.tolist() for counts in args[3:]])

    kernels().union_launcher = lambda: join
    out = attention(inputs, num_splits, config=pair_config())
    assert launches == [[[64, -1, -1], [-1, -1, 50, 64, 7]]]
    assert_matches_reference(*out, inputs)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_pairs_that_share_little_are_left_alone(interpreter, num_splits):
    """They are served by another launch, of one token a program."""
    interpreter.submit(check_tokens_left_alone, num_splits).result()


def check_only_some_launches_skip() -> None:
    """A branch on a count holds up the start of a program."""
    c, k = configs(), kernels()
    inputs = make_inputs([64], 8, 64)

    def may_skip(config) -> bool:
        kv_format = c.KVFormat.MODEL
        return k.attention_launch(inputs.q_nope, inputs.kv, inputs.topk, 1, kv_format, True, config)[1]["MAY_SKIP"]

    alone = c.get_alone_config(pair_config())
    assert (alone.group, alone.block_h) == (1, 8)
    assert may_skip(pair_config())
    assert may_skip(alone)
    assert not may_skip(dataclasses.replace(alone, alone=False))


def test_only_launches_over_unions_leave_lists_to_others(interpreter):
    interpreter.submit(check_only_some_launches_skip).result()


def check_long_prefill() -> None:
    """More tokens than one launch over unions takes."""
    c = configs()
    c.MAX_UNION_TOKENS = kernels().MAX_UNION_TOKENS = 4
    kernels().union_launcher = lambda: join_lists
    inputs = make_inputs([40, 39, 0, 7, 33, 40, 12], 4, 40, num_rows=50)
    workspace_specs = c.get_union_specs(7, 40)
    assert workspace_specs[0][0][0] == 2
    workspace = [torch.empty(0), torch.empty(0)]
    workspace += [torch.full(shape, -7, dtype=dtype) for shape, dtype in workspace_specs]
    assert_matches_reference(*attention(inputs, 1, config=pair_config(), workspace=workspace), inputs)


def test_prefill_longer_than_a_launch(interpreter):
    interpreter.submit(check_long_prefill).result()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_shapes(interpreter, data):
    num_topk = data.draw(st.integers(1, 150), "top-k")
    counts = data.draw(st.lists(st.integers(0, num_topk), min_size=1, max_size=3), "counts")
    num_heads = data.draw(st.integers(1, 40), "heads")
    rope_dim = data.draw(st.sampled_from([64, 0]), "RoPE width")
    kv_format = data.draw(st.sampled_from(KV_FORMATS), "KV format")
    num_splits = data.draw(st.integers(1, 6), "splits")
    args = counts, num_heads, num_topk, rope_dim, num_splits, kv_format
    interpreter.submit(check_matches_reference, *args).result()


def check_split_policy(num_sms: int) -> None:
    c = configs()
    for num_heads, num_topk, kv_format in [
        (1, 2048, c.KVFormat.MODEL),
        (8, 2048, c.KVFormat.MODEL),
        (11, 1152, c.KVFormat.FP8_DS_MLA),
        (32, 2000, c.KVFormat.FP8),
        (128, 512, c.KVFormat.MODEL),
    ]:
        num_partials = c.get_workspace_specs(700, num_heads, num_topk, num_sms, torch.float16, kv_format, (12, 0))[0][
            0
        ][0]
        # Partial results stay below 4 launches that fill the GPU.
        assert num_partials <= 4 * 4 * num_sms * 128
        # The rest of a long prefill may be of any size, with the prefill's configuration.
        for config in c.get_reachable_configs(num_heads, kv_format, (12, 0)):
            for num_tokens in range(1, 701):
                splits = c.get_num_splits(num_tokens, num_heads, num_topk, config, num_sms)
                assert 1 <= splits <= c.MAX_SPLITS
                assert splits == 1 or num_tokens * num_heads * splits <= num_partials
    one_token = c.get_config(1, 8, c.KVFormat.MODEL, (12, 0))
    assert c.get_num_splits(1, 8, 2048, one_token, num_sms) == c.MAX_SPLITS


@pytest.mark.parametrize("num_sms", [48, 188])
def test_splits_fit_the_workspace(compiler, num_sms):
    compiler.submit(check_split_policy, num_sms).result()


def check_table() -> None:
    c = configs()
    for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]:
        for kv_format in c.KVFormat:
            for num_heads in range(1, 257):
                reachable = c.get_reachable_configs(num_heads, kv_format, capability)
                for num_tokens in [1, 2, 7, 64, 255, 256, 257, 1000, 8192]:
                    for is_prefill in (False, True):
                        config = c.get_config(num_tokens, num_heads, kv_format, capability, is_prefill)
                        assert config in reachable
                        # One block holds all heads of both tokens of a pair.
                        assert config.group == 1 or (config.group == 2 and 2 * num_heads <= config.block_h)
                        assert is_prefill or config.group == 1
                        if config.group > 1:
                            alone = c.get_alone_config(config)
                            assert alone in reachable
                            assert (alone.group, alone.alone) == (1, True)
                            # The matrix instructions of SM90 take 16 heads, the others 8.
                            assert alone.block_h >= max(num_heads, 16 if config.gluon == "wgmma" else 8)


def test_every_launch_has_a_configuration_that_the_warm_up_compiles(compiler):
    compiler.submit(check_table).result()


def check_refuses(change: str, message: str) -> None:
    inputs = make_inputs([4], 8, 64, kv_format="fp8_e4m3" if change == "no scale" else "16-bit")
    if change == "dtype":
        inputs.kv = inputs.kv.bfloat16()
    elif change == "fp8_e5m2":
        inputs.kv = inputs.kv.to(torch.float8_e5m2)
    elif change == "float32":
        for name in ("q_nope", "q_pe", "kv"):
            setattr(inputs, name, getattr(inputs, name).float())
    elif change == "rank":
        inputs.q_nope = inputs.q_nope[..., :256]
    elif change == "kv width":
        inputs.kv = inputs.kv[:, :RANK]
    elif change == "no scale":
        inputs.kv_scale = None
    with pytest.raises(ValueError, match=message):
        attention(inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dtype", r"rows of 576 x torch.bfloat16 under a query of torch.float16"),
        ("fp8_e5m2", r"rows of 576 x torch.float8_e5m2"),
        ("float32", "query in one 16-bit dtype"),
        ("rank", "latent width of 512"),
        ("kv width", "rows of 512 x torch.float16.*expected 576 values"),
        ("no scale", "needs kv_scale"),
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
