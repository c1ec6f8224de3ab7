"""Decodes of different lengths beside a prefill, as speculative decoding makes them: every token gets its own top-k.

vLLM's metadata builder and layer function run as they are, with the kernels that VLLM_SPARSE_INDEXER_LOGITS names.
The builder takes decodes for prefills where the kernel wants them all of one length.
"""

import pytest
import torch

from tests.gpu.indexer_layer import NUM_TOPK, Prompt, build, check_token, make_builder, reserve_workspace, run_layer

pytestmark = pytest.mark.gpu

# New tokens of each request, and all its tokens with them. The last one is a prefill.
BATCHES = {
    "uniform": ([3, 3, 300], [3000, 8000, 5000]),
    "shorter first": ([1, 3, 2, 300], [3000, 8000, 4001, 5000]),
    "shorter last": ([3, 2, 1, 300], [8000, 2500, 6000, 5000]),
}


@pytest.fixture(params=["triton", "deep_gemm"])
def path(request, monkeypatch) -> str:
    """Whose kernels compute the logits."""
    from vllm.v1.attention.ops import mqa_logits_backend as backend

    if request.param == "deep_gemm" and (problem := backend._get_deep_gemm_problem()):
        pytest.skip(f"needs DeepGEMM: {problem}")
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_LOGITS", request.param)
    backend.use_triton_mqa_logits.cache_clear()
    yield request.param
    backend.use_triton_mqa_logits.cache_clear()


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return Prompt(8192)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("num_drafts", [2, 3])
def test_every_token_gets_its_own_topk(prompt, path, monkeypatch, batch, num_drafts):
    queries, lengths = batch
    reserve_workspace(prompt, sum(lengths), monkeypatch)
    metadata = build(make_builder(prompt, num_drafts), prompt, queries, lengths)
    assert metadata.num_decodes > 0
    assert metadata.num_prefills > 0
    topk = torch.full((sum(queries), NUM_TOPK), -2, dtype=torch.int32, device=prompt.device)
    run_layer(prompt, metadata, 0, sum(queries), topk, sum(lengths))

    token = 0
    for count, length in zip(queries, lengths, strict=True):
        for i in range(count):
            if count < 10 or i in (0, 1, 2, 3, count - 1):  # of the prefill, the rows behind the decodes
                check_token(prompt, token + i, topk[token + i], num_keys=length - count + i + 1)
        token += count
