"""What TRITON_MLA_SPARSE makes of its layer's cache, query and configuration, on upstream's own base classes.

The `check_` functions run in a process with a fake GPU and Triton's interpreter. Where they run the attention
kernel they use float16: the interpreter multiplies bfloat16 operands of `tl.dot` as integers.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch.nn.functional import pad

from tests.kernels.reference import Inputs, dequantize, quantize, sparse_mla_reference

BLOCK_SIZE = 64
NUM_TOPK = 100  # no multiple of 128, which upstream's index conversion asks for
NUM_HEADS = 2
MAX_TOKENS = 24
NUM_SMS = 2


def make_config(
    *, dtype="float16", num_topk=NUM_TOPK, dcp_size=1, interleave=1, num_speculative_tokens=0, hisparse=None
):
    """What the backend and the classes below it read of a VllmConfig."""
    speculative = SimpleNamespace(num_speculative_tokens=num_speculative_tokens, parallel_drafting=False)
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=getattr(torch, dtype), hf_text_config=SimpleNamespace(index_topk=num_topk)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp_size,
            prefill_context_parallel_size=1,
            pcp_shard_decode_requests=False,
            cp_kv_cache_interleave_size=interleave,
        ),
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        attention_config=SimpleNamespace(hisparse_config=hisparse, mla_prefill_backend=None),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=speculative if num_speculative_tokens else None,
    )


@contextmanager
def engine(*, dcp_rank=0, **options):
    """The surroundings in which a worker builds its model: configuration, ranks, workspace."""
    import vllm.config.vllm
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.attention import sparse_mla_attention
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import index_group
    from vllm.v1.worker import workspace

    config = make_config(**options)
    dcp = SimpleNamespace(world_size=config.parallel_config.decode_context_parallel_size, rank_in_group=dcp_rank)
    manager = workspace.WorkspaceManager(torch.device("cpu"))
    with (
        patch.object(vllm.config.vllm, "_current_vllm_config", config),
        patch.object(parallel_state, "_DCP", dcp),
        patch.object(workspace, "_manager", manager),
        # Few, so that lists are cut into few parts, which the interpreter runs one after the other.
        patch.object(type(current_platform), "num_compute_units", lambda device_id=0: NUM_SMS),
        patch.object(sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1),
        patch.object(index_group, "_create_side_stream", Mock()),
        patch.object(index_group, "_create_event", Mock()),
    ):
        yield manager


def make_impl(*, kv_cache_dtype="auto", rope_dim=64, num_topk=NUM_TOPK, **arguments):
    """Construct the implementation as MLAAttention does."""
    from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseImpl

    defaults = {
        "num_heads": NUM_HEADS,
        "head_size": 512 + rope_dim,
        "scale": 192**-0.5,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": kv_cache_dtype,
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": rope_dim,
        "qk_head_dim": 192 + rope_dim,
        "v_head_dim": 256,
        "kv_b_proj": None,
        "topk_indices_buffer": torch.full((MAX_TOKENS, num_topk), -1, dtype=torch.int32),
    }
    return TritonMLASparseImpl(**defaults | arguments)


# Constructor


def check_constructor_refuses(message: str, options: dict[str, Any]) -> None:
    with engine(), pytest.raises(NotImplementedError) as error:
        make_impl(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("got kv_cache_dtype=fp8_e5m2", {"kv_cache_dtype": "fp8_e5m2"}),
        ("got kv_cache_dtype=nvfp4_ds_mla", {"kv_cache_dtype": "nvfp4_ds_mla"}),
        ("got kv_cache_dtype=bfloat16 and dtype=float16", {"kv_cache_dtype": "bfloat16"}),
        ("requires kv_lora_rank 512, got 256", {"kv_lora_rank": 256}),
        ("sliding window", {"sliding_window": 128}),
        ("only supports decoder self-attention", {"attn_type": "encoder_only"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_constructor_refuses_what_selection_would(interpreter, message, options):
    interpreter.submit(check_constructor_refuses, message, options).result()


def check_dense_mha_prefill(dtype: str, kv_cache_dtype: str, rope_dim: int, expected: bool) -> None:
    with engine(dtype=dtype):
        assert make_impl(kv_cache_dtype=kv_cache_dtype, rope_dim=rope_dim).supports_dense_mha_prefill is expected


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "rope_dim", "expected"),
    [
        ("float16", "auto", 64, True),
        ("float16", "fp8", 0, True),
        ("bfloat16", "fp8_ds_mla", 64, True),
        # Upstream's gather of fp8_ds_mla writes 576 bfloat16 values a row.
        ("float16", "fp8_ds_mla", 64, False),
        ("bfloat16", "fp8_ds_mla", 0, False),
    ],
)
def test_dense_mha_prefill_is_off_where_its_gather_cannot_write(interpreter, dtype, kv_cache_dtype, rope_dim, expected):
    interpreter.submit(check_dense_mha_prefill, dtype, kv_cache_dtype, rope_dim, expected).result()


def check_head_count_under_dcp(dcp_size: int) -> None:
    from vllm.v1.attention.backends.mla import triton_mla_sparse as backend
    from vllm.v1.attention.ops.triton_mla_sparse import KVFormat

    with (
        engine(dcp_size=dcp_size),
        patch.object(backend, "get_workspace_specs", return_value=[((3, 5), torch.float32)]) as specs,
        patch.object(backend, "register_warmup") as warmup,
    ):
        impl = make_impl(kv_cache_dtype="fp8_e4m3")
    expected = {
        "num_heads": NUM_HEADS * dcp_size,
        "num_topk": NUM_TOPK,
        "dtype": torch.float16,
        "kv_format": KVFormat.FP8,
        "capability": (12, 0),
    }
    specs.assert_called_once_with(max_num_tokens=MAX_TOKENS, num_sms=NUM_SMS, **expected)
    warmup.assert_called_once_with(has_rope=True, **expected)
    assert impl.need_to_return_lse_for_decode == (dcp_size > 1)
    assert impl.lse_base_on_e


@pytest.mark.parametrize("dcp_size", [1, 2, 4])
def test_scratch_and_warmup_are_for_the_heads_of_the_dcp_group(interpreter, dcp_size):
    interpreter.submit(check_head_count_under_dcp, dcp_size).result()


def check_context_parallel_gate() -> None:
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseBackend
    from vllm.v1.worker import cp_utils

    with engine(dcp_size=2, num_speculative_tokens=3, interleave=16):
        layer = SimpleNamespace(impl=make_impl(), get_attn_backend=lambda: TritonMLASparseBackend)
        config = get_current_vllm_config()
        with patch.object(cp_utils, "get_layers_from_vllm_config", return_value={"layers.0.attn": layer}):
            cp_utils.check_attention_cp_compatibility(config)
            config.parallel_config.prefill_context_parallel_size = 2
            with pytest.raises(AssertionError, match="TRITON_MLA_SPARSE does not support PCP"):
                cp_utils.check_attention_cp_compatibility(config)


def test_the_engine_lets_dcp_start_with_drafts_and_any_interleave_but_not_pcp(interpreter):
    interpreter.submit(check_context_parallel_gate).result()


def check_warmups() -> None:
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseBackend

    registry = JitWarmupRegistry(None)
    no_prefill_backend = patch.object(mla_attention, "get_mla_prefill_backend", side_effect=ValueError)
    # The layer's quantisation operators, which it makes for every backend.
    no_operators = [patch.object(mla_attention, each) for each in ("_DecodeConcatQuantFP8", "QuantFP8")]
    with engine(), registry.activate(), no_prefill_backend, no_operators[0], no_operators[1]:
        layer = mla_attention.MLAAttention(
            num_heads=NUM_HEADS,
            scale=192**-0.5,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            q_lora_rank=None,
            kv_lora_rank=512,
            kv_b_proj=Mock(),
            prefix="layers.0.attn",
            attn_backend=TritonMLASparseBackend,
            use_sparse=True,
            topk_indices_buffer=torch.full((MAX_TOKENS, NUM_TOPK), -1, dtype=torch.int32),
        )
        layer.bind_kv_cache(torch.zeros(2, 1, BLOCK_SIZE, 576).half())
    registered = {type(kernel).__name__ for kernel in registry._registrations}
    registered |= {getattr(kernel, "__name__", "") for kernel in registry._registrations}
    assert registered >= {
        "sparse_mla",
        "merge_splits",
        "ConvertReqIndexToGlobalIndexKernel",
        "PrepareUniformDecodeKernel",
        "BuildPrefillChunkMetadataKernel",
    }, registered


def test_a_layer_registers_every_kernel_that_its_backend_brings_along(interpreter):
    interpreter.submit(check_warmups).result()


# Forward


def lay_out(stored: list[torch.Tensor], owned: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the owned rows of each request into blocks, between which other layers' pages lie.

    Returns the cache [blocks, BLOCK_SIZE, width] and the block table [requests, blocks of the longest]. Blocks
    are in no order; whatever holds no row is poisoned.
    """
    counts = [len(positions.split(BLOCK_SIZE)) for positions in owned]
    width, dtype = stored[0].shape[1], stored[0].dtype
    poison = float("nan") if dtype.is_floating_point else 0x7F
    blocks = torch.full((1 + sum(counts), BLOCK_SIZE + 32, width), poison, dtype=dtype)
    numbers = iter((1 + torch.randperm(sum(counts))).tolist())
    block_table = torch.zeros((len(stored), max(counts)), dtype=torch.int32)
    for request, (rows, positions) in enumerate(zip(stored, owned, strict=True)):
        for index, part in enumerate(rows[positions].split(BLOCK_SIZE)):
            block_table[request, index] = block = next(numbers)
            blocks[block, : len(part)] = part
    return blocks[:, :BLOCK_SIZE], block_table


class Batch:
    """A mixed batch over a cache: two decodes, one of them of a single token's context, and a prefill of three."""

    LENGTHS = (150, 1, 70)
    TOKENS = (0, 1, 2, 2, 2)  # the request of each token
    NUM_DECODES = 2

    def __init__(
        self, kv_cache_dtype: str, rope_dim: int, num_heads: int = NUM_HEADS, num_topk: int = NUM_TOPK
    ) -> None:
        torch.manual_seed(0)
        self.kv_cache_dtype = kv_cache_dtype
        kv_format = {"auto": "16-bit", "fp8": "fp8_e4m3"}.get(kv_cache_dtype, kv_cache_dtype)
        values = torch.randn(sum(self.LENGTHS), 512 + rope_dim).half()
        rows, self.kv_scale = quantize(values, kv_format)
        self.stored = list(rows.split(self.LENGTHS))
        self.req_ids = torch.tensor(self.TOKENS, dtype=torch.int32)
        self.topk = torch.full((len(self.TOKENS), num_topk), -1, dtype=torch.int32)
        flat = self.topk.clone()
        counts = []
        for token, request in enumerate(self.TOKENS):
            length = self.LENGTHS[request]
            positions = torch.randperm(length)[: -(-2 * length // 3)].int()
            self.topk[token, : len(positions)] = positions
            flat[token, : len(positions)] = positions + sum(self.LENGTHS[:request])
            counts.append(len(positions))
        self.q = torch.randn(len(self.TOKENS), num_heads, 512 + rope_dim).half()
        self.reference = Inputs(
            *self.q.split([512, rope_dim], dim=-1),
            kv=rows,
            topk=flat,
            valid_count=torch.tensor(counts, dtype=torch.int32),
            kv_scale=self.kv_scale,
        )

    def forward(self, impl, q, *, dcp_size: int = 1, interleave: int = 1):
        """Run the layer as MLAAttention does, on the rows that the implementation's DCP rank owns."""
        owned = [torch.arange(length) for length in self.LENGTHS]
        owned = [positions[positions // interleave % dcp_size == impl.dcp_rank] for positions in owned]
        cache, block_table = lay_out(self.stored, owned)
        if self.kv_cache_dtype == "fp8":
            cache = cache.view(torch.float8_e4m3fn)
        impl.topk_indices_buffer[: len(self.TOKENS)] = self.topk
        metadata = SimpleNamespace(
            num_decode_tokens=self.NUM_DECODES,
            block_size=BLOCK_SIZE,
            block_table=block_table,
            req_id_per_token=self.req_ids,
            cp_kv_cache_interleave_size=interleave,
        )
        return impl.forward_mqa(q, cache, metadata, SimpleNamespace(_k_scale=self.kv_scale))


def assert_close(out: torch.Tensor, lse: torch.Tensor, inputs: Inputs) -> None:
    expected_out, expected_lse = sparse_mla_reference(inputs)
    error = (out.double() - expected_out).norm() / expected_out.norm()
    assert error < 1e-3, error
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-3)


def check_forward(kv_cache_dtype: str, rope_dim: int) -> None:
    batch = Batch(kv_cache_dtype, rope_dim)
    with engine() as manager:
        impl = make_impl(kv_cache_dtype=kv_cache_dtype, rope_dim=rope_dim)
        manager.lock()
        q = batch.q.split([512, rope_dim], dim=-1)
        assert_close(*batch.forward(impl, q), batch.reference)


@pytest.mark.parametrize("rope_dim", [64, 0])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_forward_attends_to_the_cached_rows(interpreter, kv_cache_dtype, rope_dim):
    interpreter.submit(check_forward, kv_cache_dtype, rope_dim).result()


def check_dcp(dcp_size: int, interleave: int, kv_cache_dtype: str) -> None:
    from vllm.v1.attention.ops.dcp import _lse_weighted_combine

    num_topk = 512  # the narrowest that the indexer merges
    batch = Batch(kv_cache_dtype, 64, NUM_HEADS * dcp_size, num_topk)
    outs, lses = [], []
    for rank in range(dcp_size):
        with engine(dcp_size=dcp_size, dcp_rank=rank) as manager:
            impl = make_impl(kv_cache_dtype=kv_cache_dtype, num_topk=num_topk)
            manager.lock()
            # One tensor with the heads of the whole group, as the query gather leaves it.
            out, lse = batch.forward(impl, batch.q, dcp_size=dcp_size, interleave=interleave)
        outs.append(out)
        lses.append(lse)
    # The second request has one row: all ranks but its owner's have nothing to say.
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        assert (out[1] == 0).all()
        assert (lse[1] == float("-inf")).all()
    out, lse = _lse_weighted_combine(torch.stack(outs).float(), torch.stack(lses), return_lse=True)
    assert_close(out, lse, batch.reference)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize(("dcp_size", "interleave"), [(2, 1), (2, 16), (4, 1)])
def test_dcp_ranks_merge_to_the_whole(interpreter, dcp_size, interleave, kv_cache_dtype):
    interpreter.submit(check_dcp, dcp_size, interleave, kv_cache_dtype).result()


def check_scratch_is_bounded() -> None:
    batch = Batch("auto", 64)
    with engine() as manager:
        impl = make_impl()
        reserved = manager._current_workspaces[0].numel()
        for num_tokens in (1, MAX_TOKENS):
            batch.TOKENS = (0,) * num_tokens
            batch.req_ids = torch.zeros(num_tokens, dtype=torch.int32)
            batch.topk = batch.topk[:1].expand(num_tokens, -1)
            q = torch.randn(num_tokens, NUM_HEADS, 576).half()
            batch.forward(impl, q)
        assert manager._current_workspaces[0].numel() == reserved


def test_no_batch_outgrows_the_scratch_reserved_at_construction(interpreter):
    interpreter.submit(check_scratch_is_bounded).result()


def check_prefill_hint(num_decode_tokens: int, num_tokens: int, expected: bool) -> None:
    from vllm.v1.attention.backends.mla import triton_mla_sparse as backend

    with engine(), patch.object(backend, "sparse_mla_attention") as kernel:
        metadata = SimpleNamespace(
            num_decode_tokens=num_decode_tokens,
            block_size=BLOCK_SIZE,
            block_table=torch.zeros((1, 1), dtype=torch.int32),
            req_id_per_token=torch.zeros(8, dtype=torch.int32),
        )
        q = torch.zeros(num_tokens, NUM_HEADS, 576).half()
        cache = torch.zeros(2, BLOCK_SIZE, 576).half()
        make_impl().forward_mqa(q, cache, metadata, SimpleNamespace())
    assert kernel.call_args.kwargs["is_prefill"] is expected


@pytest.mark.parametrize(
    ("num_decode_tokens", "num_tokens", "expected"),
    [
        (8, 8, False),  # decodes only
        (0, 8, True),  # a prefill
        (2, 8, True),  # mostly prefill
        (6, 8, False),  # decodes and the last tokens of a prompt
        (2, 2, False),  # dense MHA took the prefill
    ],
)
def test_neighbours_share_rows_in_batches_of_mostly_prefill(interpreter, num_decode_tokens, num_tokens, expected):
    interpreter.submit(check_prefill_hint, num_decode_tokens, num_tokens, expected).result()


# KV cache writer


def check_writer(dtype: str, kv_cache_dtype: str) -> None:
    from vllm import _custom_ops as ops

    kv_c = torch.randn(3, 512).to(getattr(torch, dtype))
    k_pe = torch.randn(3, 1, 64).to(kv_c.dtype)
    with engine(dtype=dtype), patch.object(ops, "concat_and_cache_mla") as writer:
        impl = make_impl(kv_cache_dtype=kv_cache_dtype)
        cache, slots, scale = torch.zeros(1, 64, 656, dtype=torch.uint8), torch.arange(3), torch.ones(())
        impl.do_kv_cache_update(kv_c, k_pe, cache, slots, kv_cache_dtype, scale)
    written_kv_c, written_k_pe = writer.call_args.args[:2]
    # The native writer takes both parts in one dtype, and copies the bits of k_pe.
    assert written_k_pe.dtype == written_kv_c.dtype == kv_c.dtype
    assert torch.equal(written_kv_c, kv_c)
    expected = k_pe.bfloat16() if kv_cache_dtype == "fp8_ds_mla" else k_pe
    assert torch.equal(written_k_pe.view(expected.dtype), expected[:, 0])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_rope_part_of_fp8_ds_mla_is_bfloat16(interpreter, dtype, kv_cache_dtype):
    interpreter.submit(check_writer, dtype, kv_cache_dtype).result()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rope_dim", [64, 0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_native_writer_writes_what_the_kernel_reads(dtype, rope_dim):
    from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseImpl
    from vllm.v1.attention.ops.triton_mla_sparse import KVFormat

    impl = object.__new__(TritonMLASparseImpl)
    impl.kv_format = KVFormat.FP8_DS_MLA
    values = torch.randn(64, 512 + rope_dim, device="cuda").to(dtype)
    cache = torch.full((1, BLOCK_SIZE, 656), 0x7F, dtype=torch.uint8, device="cuda")
    kv_c, k_pe = values[:, :512], values[:, None, 512:]
    slots = torch.randperm(64, device="cuda")
    impl.do_kv_cache_update(kv_c, k_pe, cache, slots, "fp8_ds_mla", torch.ones((), device="cuda"))
    rows = dequantize(cache[0, slots].cpu(), None, 64)
    latent, rope = values.cpu().double().split([512, rope_dim], dim=-1)
    torch.testing.assert_close(rows[:, :512], latent, rtol=2**-4, atol=1e-3)  # e4m3 has three fraction bits
    assert torch.equal(rows[:, 512:], pad(rope.bfloat16().double(), (0, 64 - rope_dim)))


# Metadata


def make_builder(**options):
    """Construct the builder on a base class that only knows the configuration."""
    from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonMetadataBuilder
    from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseMetadataBuilder

    config = make_config(**options)

    def init(self, kv_cache_spec, layer_names, vllm_config, device):
        self.vllm_config = vllm_config
        self.dcp_world_size = vllm_config.parallel_config.decode_context_parallel_size

    with patch.object(SparseMLACommonMetadataBuilder, "__init__", init):
        return TritonMLASparseMetadataBuilder(None, ["layer"], config, torch.device("cpu"))


def check_decodes(options: dict[str, Any], threshold: int, updates_draft: bool) -> None:
    builder = make_builder(**options)
    assert builder.reorder_batch_threshold == threshold
    assert builder.supports_draft_decode_metadata_update is updates_draft


@pytest.mark.parametrize(
    ("options", "threshold", "updates_draft"),
    [
        ({}, 1, True),
        ({"num_speculative_tokens": 1}, 2, True),
        ({"num_speculative_tokens": 3}, 4, True),
        # A verification is a decode under DCP, too; the indexer cannot update drafts there.
        ({"num_speculative_tokens": 3, "dcp_size": 2}, 4, False),
        ({"num_speculative_tokens": 3, "hisparse": "on"}, 4, False),
    ],
    ids=str,
)
def test_what_counts_as_decode_and_who_updates_drafts(interpreter, options, threshold, updates_draft):
    interpreter.submit(check_decodes, options, threshold, updates_draft).result()


def check_draft_update() -> None:
    # Three requests, the last one a CUDA graph's padding, in a graph of four tokens.
    metadata = SimpleNamespace(
        num_decode_tokens=4,
        query_start_loc=torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        req_id_per_token=torch.full((4,), 99, dtype=torch.int32),
    )
    make_builder().update_draft_decode_metadata(metadata)
    # A token of no request must still name a row of the block table.
    assert metadata.req_id_per_token.tolist() == [0, 1, 2, 2]
    metadata.num_decode_tokens = 0
    metadata.query_start_loc = None
    make_builder().update_draft_decode_metadata(metadata)


def test_a_draft_step_maps_its_tokens_to_requests(interpreter):
    interpreter.submit(check_draft_update).result()
