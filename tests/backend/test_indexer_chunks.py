"""How vLLM cuts the prefill of long prompts, so that the logits of a chunk stay within their budget.

That the chunks are what is allocated, one at a time, is for a GPU to show: tests/gpu/test_indexer_memory.py.
"""

import pytest
import torch

PROMPT = 200_000
STEP = 8192
MIB = 1 << 20
# Keys that a chunk may gather: what get_max_prefill_buffer_size gives this prompt's model.
WORKSPACE = 40 * PROMPT


def split(lengths: list[int], queries: list[int], budget_mib: int) -> list[tuple[slice, slice]]:
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

    return DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks(
        torch.tensor(lengths), torch.tensor(queries), WORKSPACE, budget_mib * MIB
    )


def default_budget_mib() -> int:
    import vllm.envs as envs

    return envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB


def assert_in_budget(
    chunks: list[tuple[slice, slice]], lengths: list[int], queries: list[int], budget_mib: int
) -> None:
    """Assert that the chunks are all tokens once, in order, none too large, and none smaller than it has to be."""
    elements = budget_mib * MIB // 4
    request, token = 0, 0
    for requests, tokens in chunks:
        if tokens.start == 0:
            assert (requests.start, token) == (request, 0)
        width, rows = sum(lengths[requests]), sum(queries[requests])
        count = tokens.stop - tokens.start
        assert count * width <= elements or count == 1
        assert tokens.start == token
        token = tokens.stop
        if token == rows:
            request, token = requests.stop, 0
        else:
            assert (count + 1) * width > elements, "room for another row"
    assert (request, token) == (len(lengths), 0)


@pytest.mark.parametrize("budget_mib", [64, 512, 12 << 10])
def test_a_prompt_in_one_step(interpreter, budget_mib):
    chunks = interpreter.submit(split, [PROMPT], [PROMPT], budget_mib).result()
    assert_in_budget(chunks, [PROMPT], [PROMPT], budget_mib)
    assert len(chunks) == -(-PROMPT // (budget_mib * MIB // 4 // PROMPT))


def test_a_prompt_in_the_steps_of_the_scheduler(interpreter):
    budget_mib = interpreter.submit(default_budget_mib).result()
    counts = []
    for start in range(0, PROMPT, STEP):
        stop = min(start + STEP, PROMPT)
        chunks = interpreter.submit(split, [stop], [stop - start], budget_mib).result()
        assert_in_budget(chunks, [stop], [stop - start], budget_mib)
        counts.append(len(chunks))
    assert counts[0] == 1
    assert counts[-2] > 10


def test_long_prompts_beside_others(interpreter):
    lengths, queries = [900, PROMPT, 1200, 300, PROMPT - 64], [900, 4096, 700, 2, 4096]
    chunks = interpreter.submit(split, lengths, queries, 512).result()
    assert_in_budget(chunks, lengths, queries, 512)
    assert (slice(2, 4), slice(0, 702)) in chunks, "short ones share a chunk"


def test_a_budget_below_one_row_leaves_single_rows(interpreter):
    chunks = interpreter.submit(split, [PROMPT * 10], [5], 1).result()
    assert [tokens for _, tokens in chunks] == [slice(row, row + 1) for row in range(5)]
