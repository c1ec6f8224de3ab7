"""vLLM's own metadata builder and layer function of the indexer, around synthetic queries and keys."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.mqa_reference import pack_blocks, score

HEADS = 32
HEAD_DIM = 128
BLOCK = 64
NUM_TOPK = 2048
MAX_TOKENS = 8192  # of a step
LAYER = "indexer"


class Prompt:
    """Queries, weights and a cache of a prompt whose blocks lie in any order."""

    def __init__(self, length: int, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.length = length
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.q = torch.empty(length, HEADS, HEAD_DIM, dtype=torch.float8_e4m3fn, device=device)
        for part in self.q.split(MAX_TOKENS):
            part.copy_(torch.randn(part.shape, device=device))
        self.weights = torch.randn(length, HEADS, device=device)
        self.k = torch.randn(length, HEAD_DIM, device=device).to(torch.float8_e4m3fn)
        self.k_scale = torch.exp2(torch.randint(-2, 1, (length,), device=device).float())

        blocks = length // BLOCK
        assert blocks * BLOCK == length
        self.block_table = torch.randperm(blocks, dtype=torch.int32, device=device)[None]
        self.cache = torch.empty(blocks, BLOCK, HEAD_DIM + 4, dtype=torch.uint8, device=device)
        pages = pack_blocks(self.k.view(blocks, BLOCK, HEAD_DIM), self.k_scale.view(blocks, BLOCK))
        self.cache[self.block_table[0].long()] = pages.squeeze(2)

    def logits(self, token: int, num_keys: int) -> torch.Tensor:
        """Return float64 [num_keys]: what a token gives each of the first keys."""
        own = slice(token, token + 1)
        return score(self.q[own], self.k[:num_keys], self.k_scale[:num_keys], self.weights[own])[0]


def make_builder(prompt: Prompt, num_drafts: int = 0):
    """Return vLLM's metadata builder of the indexer, on what it reads of a configuration."""
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=prompt.length),
        # Sizes the buffers of decodes only.
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_TOKENS),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        attention_config=SimpleNamespace(
            resolve_indexer_kv_dtype=lambda default: default,
            sparse_mla_prefill_workspace_factor=5,
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        speculative_config=SimpleNamespace(num_speculative_tokens=num_drafts, enable_adaptive_verification=False)
        if num_drafts
        else None,
        num_speculative_tokens=num_drafts,
    )
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HEAD_DIM + 4, dtype=torch.uint8)
    return DeepseekV32IndexerMetadataBuilder(
        kv_cache_spec=spec,
        layer_names=[LAYER],
        vllm_config=config,
        device=prompt.device,
        block_table_width=prompt.block_table.shape[1],
    )


def build(builder, prompt: Prompt, queries: list[int], lengths: list[int]):
    """Return the metadata of a step: requests with so many new tokens, and so many with those."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *queries]).cumsum(0).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(prompt.device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(prompt.device),
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(queries),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        block_table_tensor=prompt.block_table.repeat(len(queries), 1),
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64, device=prompt.device),
    )
    return builder.build(0, common)


def reserve_workspace(prompt: Prompt, num_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what so many gathered keys take, which the profiling run reserves."""
    from vllm.v1.worker import workspace

    manager = workspace.WorkspaceManager(prompt.device)
    monkeypatch.setattr(workspace, "_manager", manager)
    manager.get_simultaneous(((num_keys, HEAD_DIM), torch.float8_e4m3fn), ((num_keys, 4), torch.uint8))


def run_layer(prompt: Prompt, metadata, start: int, stop: int, topk: torch.Tensor, num_keys: int) -> None:
    """Write the top-k of the tokens from `start` to `stop` into the first rows of `topk`.

    The prefills of the step may gather `num_keys` keys.
    """
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.sparse_attn_indexer import sparse_attn_indexer

    context = SimpleNamespace(attn_metadata={LAYER: metadata}, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    with override_forward_context(context):
        sparse_attn_indexer(
            hidden_states=prompt.weights[start:stop],  # asked for its length only
            k_cache_prefix=LAYER,
            kv_cache=prompt.cache,
            q_quant=prompt.q[start:stop],
            q_scale=None,
            k=None,
            weights=prompt.weights[start:stop],
            quant_block_size=HEAD_DIM,
            scale_fmt="ue8m0",
            topk_tokens=NUM_TOPK,
            head_dim=HEAD_DIM,
            max_model_len=prompt.length,
            total_seq_lens=num_keys,
            topk_indices_buffer=topk,
            skip_k_cache_insert=True,
            use_pcp=False,
            pcp_shard_decode_requests=False,
            dense_mha_metadata_layer_name="",
        )


def check_token(prompt: Prompt, token: int, chosen: torch.Tensor, num_keys: int | None = None) -> None:
    """Assert that `chosen`, int32 [k], are the keys of the largest logits but for rounding, then -1.

    The token sees `num_keys`, by default those of a prompt up to its own.
    """
    num_keys = num_keys or token + 1
    count = min(len(chosen), num_keys)
    keys = chosen[chosen >= 0].long()
    assert len(keys) == count, token
    assert len(keys.unique()) == count, token
    assert keys.max() < num_keys, token
    logits = prompt.logits(token, num_keys)
    last = logits.topk(count).values[-1]
    assert (logits[keys] >= last).double().mean() >= 0.999, token
    assert (logits[keys] >= last - 1e-3 * logits.abs().max()).all(), token
