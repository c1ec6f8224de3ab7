"""Chunked prefill, prefill and decode in one batch, requests that come and go, and prefix caching, in one engine.

The indexer's logits are those of Triton's kernels.
"""

import pytest
import torch

from tests.gpu.engine import TRITON_INDEXER, Run
from tests.gpu.prompts import both, decode, decode_errors, errors_of_both
from tests.gpu.yardstick import DECODE_MARGIN, LENGTHS, NATIVE, check, native_errors

pytestmark = pytest.mark.gpu

CHUNK = 512  # tokens of a step, so that the longest prompt takes six
CHUNKED = [900, 2500, 3000]
CACHED = [2048, 2500, 3000]
# Long prompts arrive while short ones decode; a short one arrives into that.
STAGGERED = [(17, 0), (900, 0), (2047, 0), (3000, 20), (2500, 30), (2049, 60)]  # length, step of arrival

RUN = Run(
    "scheduling",
    "float16",
    "TRITON_MLA_SPARSE",
    [
        both(CHUNKED),
        [decode(length) for length in CACHED],
        [decode(length, cached=True) for length in CACHED],
        [decode(length, after_steps=step) for length, step in STAGGERED],
    ],
    {
        "max_model_len": 4096,
        "max_num_batched_tokens": CHUNK,
        "enable_prefix_caching": True,
        "enable_trace_replay": True,
    },
    environment=TRITON_INDEXER,
)
ROUNDS = dict(zip(["chunked", "first", "cached", "staggered"], range(4), strict=True))

runs = pytest.mark.parametrize(("run", "native"), [(RUN, NATIVE["float16"])], ids=str)


def answers_of(engines, run: Run, name: str) -> list[dict]:
    result = engines.result(run)
    assert result["workers"][0]["backends"] == ["TRITON_MLA_SPARSE"]
    assert result["workers"][0]["triton_indexer"]
    return result["rounds"][ROUNDS[name]]["answers"]


@runs
def test_chunked_prefill_beside_decodes(engines, reference, run, native):
    """Prompts end in different steps: the shorter ones decode while the longer ones are still read."""
    found = errors_of_both(answers_of(engines, run, "chunked"), CHUNKED, reference)
    check(found, native_errors(engines, native, LENGTHS, reference))


def mean_decode_error(answers: list[dict], lengths: list[int], reference) -> float:
    return torch.cat([decode_errors(a, length, reference) for a, length in zip(answers, lengths, strict=True)]).mean()


def native_decode_error(engines, native: Run, lengths: list[int], reference) -> float:
    yardstick = native_errors(engines, native, LENGTHS, reference)
    return sum(yardstick[length].decode for length in lengths) / len(lengths)


@runs
def test_prefix_caching(engines, reference, run, native):
    first, cached = answers_of(engines, run, "first"), answers_of(engines, run, "cached")
    assert [answer["num_cached"] for answer in first] == [0] * len(CACHED)
    for answer, length in zip(cached, CACHED, strict=True):
        assert answer["num_cached"] >= length - 256  # all but the last block
    limit = native_decode_error(engines, native, CACHED, reference)
    assert mean_decode_error(cached, CACHED, reference) <= limit + DECODE_MARGIN
    # Batches of other sizes round differently, but no further apart than both may be from the reference.
    pairs = [(torch.tensor(a["logprobs"]), torch.tensor(b["logprobs"])) for a, b in zip(first, cached, strict=True)]
    assert torch.cat([a - b for a, b in pairs]).abs().mean() <= 2 * limit


@runs
def test_requests_that_come_and_go(engines, reference, run, native):
    lengths = [length for length, _ in STAGGERED]
    answers = answers_of(engines, run, "staggered")
    limit = native_decode_error(engines, native, lengths, reference)
    assert mean_decode_error(answers, lengths, reference) <= limit + DECODE_MARGIN
