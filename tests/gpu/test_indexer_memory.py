"""The indexer over a prompt of 200000 tokens: its logits stay within their budget, and the top-k are right.

All logits of such a prompt would take 160 GB. vLLM's metadata builder cuts every step into chunks whose logits take at
most VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, and its layer function gathers the keys and goes through the chunks. Both run
here as they are; the kernel of the logits is Triton's, whichever this GPU would choose.
"""

import pytest
import torch

from tests.gpu.indexer_layer import (
    MAX_TOKENS,
    NUM_TOPK,
    Prompt,
    build,
    check_token,
    make_builder,
    reserve_workspace,
    run_layer,
)
from tests.kernels.overlay import load_overlay

pytestmark = pytest.mark.gpu

PROMPT = 200_000
STEP = MAX_TOKENS  # of the scheduler
MIB = 1 << 20
# Beside the logits: row ends, and rows that are a little longer to be aligned.
MARGIN_MIB = 32


def prefill(prompt: Prompt, step: int, budget_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in steps of so many tokens; check memory, and the tokens at both ends of some chunks."""
    from vllm.model_executor.layers import sparse_attn_indexer

    kernels = load_overlay("vllm.v1.attention.ops.triton_mqa_logits")

    def mqa_logits(q, kv, weights, starts, ends, max_seqlen_k):
        return kernels.mqa_logits(q[0], *kv, weights, starts, ends, max_seqlen_k)

    monkeypatch.setattr(sparse_attn_indexer, "fp8_fp4_mqa_logits", mqa_logits)
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", str(budget_mib))
    reserve_workspace(prompt, prompt.length, monkeypatch)
    builder = make_builder(prompt)
    topk = torch.full((min(step, prompt.length), NUM_TOPK), -2, dtype=torch.int32, device=prompt.device)

    for start in range(0, prompt.length, step):
        stop = min(start + step, prompt.length)
        metadata = build(builder, prompt, [stop - start], [stop])
        chunks = metadata.prefill.chunks
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_layer(prompt, metadata, start, stop, topk, prompt.length)
        peak_mib = (torch.cuda.max_memory_allocated() - before) / MIB
        assert peak_mib <= budget_mib + MARGIN_MIB, f"{len(chunks)} chunks of tokens {start} to {stop}"
        largest = max((chunk.token_end - chunk.token_start) * chunk.max_seqlen_k for chunk in chunks)
        assert peak_mib >= 4 * largest / MIB, "not where the logits are"
        if (stop - start) * stop * 4 > 2 * budget_mib * MIB:
            assert len(chunks) > 1, "nothing was cut"

        for chunk in [chunks[0], chunks[len(chunks) // 2], chunks[-1]]:
            for row in {chunk.token_start, chunk.token_end - 1}:
                check_token(prompt, start + row, topk[row])


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return Prompt(PROMPT)


def test_in_the_steps_of_the_scheduler(prompt, monkeypatch):
    prefill(prompt, STEP, 512, monkeypatch)


def test_in_one_step(prompt, monkeypatch):
    prefill(prompt, PROMPT, 512, monkeypatch)


def test_a_budget_of_more_than_two_to_the_31_logits(prompt, monkeypatch):
    """The rows of a chunk then begin at offsets that no 32 bits hold."""
    budget_mib = 12 << 10
    free_mib = torch.cuda.mem_get_info()[0] // MIB
    if free_mib < 2 * budget_mib:
        pytest.skip(f"needs {2 * budget_mib} MiB of free GPU memory, {free_mib} MiB are free")
    assert budget_mib * MIB // 4 > 2**31
    prefill(prompt, PROMPT, budget_mib, monkeypatch)
