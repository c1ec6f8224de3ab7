"""Speculative decoding with the tiny GLM-5's MTP layer, one to three draft tokens, with CUDA graphs.

A random layer's drafts are right by chance only. So most runs use vLLM's
synthetic acceptance, which accepts at given rates whatever the drafts are. The
emitted tokens are then partly drafts, and their log-probabilities, which the
model computes when it verifies them, must be the reference's.

With two and three drafts, the indexer's logits are those of Triton's kernels.
"""

import pytest
import torch

from tests.gpu.engine import TRITON_INDEXER, Run
from tests.gpu.prompts import generate, tokens

pytestmark = pytest.mark.gpu

NUM_GENERATED = 48
LENGTHS = [17, 40, 300, 700, 1500, 2040, 2500, 3000]  # of prompts; all are decoded together


def mtp_run(name: str, backend: str, num_drafts: int, acceptance: list[float] | None, **fields) -> Run:
    """Return a run that accepts drafts where they are the model's own choice, or at the given rates."""
    speculation = {"method": "mtp", "num_speculative_tokens": num_drafts}
    if acceptance is not None:
        speculation |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": acceptance}
    options = {
        "max_model_len": 4096,
        "speculative_config": speculation,
        "per_request_spec_decode_metrics": "summary",
        "compilation_config": {"cudagraph_capture_sizes": [n * (1 + num_drafts) for n in (1, 2, 4, 8)]},
    }
    return Run(name, "float16", backend, [[generate(length, NUM_GENERATED) for length in LENGTHS]], options, **fields)


GREEDY = mtp_run("MTP 1", "TRITON_MLA_SPARSE", 1, None)
SOME_ACCEPTED = mtp_run("MTP 2", "TRITON_MLA_SPARSE", 2, [0.8, 0.5], environment=TRITON_INDEXER)
ALL_ACCEPTED = mtp_run("MTP 3", "TRITON_MLA_SPARSE", 3, [1.0, 1.0, 1.0], environment=TRITON_INDEXER)
NATIVE = mtp_run("MTP 3, native", "FLASH_ATTN_MLA_SPARSE", 3, [1.0, 1.0, 1.0], needs_capability=9)

# Mean |difference| of log-probabilities over 8 * 48 tokens. Five times the native
# backend's error over decoded tokens; a token computed from a wrong position or
# from wrong rows is off by more than 1.
MAX_ERROR = 0.15


def answers_of(engines, run: Run) -> list[dict]:
    result = engines.result(run)
    assert result["workers"][0]["backends"] == [run.backend]
    assert "FULL" in result["workers"][0]["graphs"]
    assert result["workers"][0]["triton_indexer"] or run.environment != TRITON_INDEXER
    return result["rounds"][0]["answers"]


def sequences(answers: list[dict]) -> list[list[int]]:
    return [tokens(length)[:length] + answer["generated"] for length, answer in zip(LENGTHS, answers, strict=True)]


@pytest.mark.parametrize("run", [GREEDY, SOME_ACCEPTED, ALL_ACCEPTED], ids=str)
def test_emitted_tokens_have_the_models_logprobs(engines, reference, run):
    answers = answers_of(engines, run)
    errors = []
    for answer, sequence in zip(answers, sequences(answers), strict=True):
        assert len(answer["generated"]) == NUM_GENERATED
        expected = reference.chosen(sequence)[-NUM_GENERATED:]
        errors.append((torch.tensor(answer["logprobs"]) - expected).abs())
    print(f"{run}: mean errors {[round(error.mean().item(), 5) for error in errors]}")
    assert torch.cat(errors).mean() <= MAX_ERROR


@pytest.mark.parametrize(
    ("run", "accepted"),
    [(GREEDY, (0.0, 0.2)), (SOME_ACCEPTED, (0.5, 0.8)), (ALL_ACCEPTED, (0.95, 1.0))],
    ids=str,
)
def test_drafts_are_accepted_as_they_should_be(engines, run, accepted):
    """A random draft is right once in 256 times; rates 0.8 and 0.5 accept 1.3 of 2 drafts."""
    answers = answers_of(engines, run)
    num_drafted = sum(answer["num_drafted"] for answer in answers)
    num_accepted = sum(answer["num_accepted"] for answer in answers)
    assert num_drafted > 0
    least, most = accepted
    assert least <= num_accepted / num_drafted <= most


@pytest.mark.parametrize("run", [GREEDY], ids=str)
def test_verified_tokens_are_the_greedy_ones(engines, reference, run):
    """A token may only lose to the reference's choice where both are within the error of each other."""
    answers = answers_of(engines, run)
    regrets = []
    for sequence in sequences(answers):
        best = reference.logprobs(sequence)[-NUM_GENERATED:].max(dim=-1).values
        regrets.append(best - reference.chosen(sequence)[-NUM_GENERATED:])
    assert torch.cat(regrets).mean() <= MAX_ERROR


@pytest.mark.parametrize(("run", "native"), [(ALL_ACCEPTED, NATIVE)], ids=str)
def test_drafts_are_the_native_backends(engines, run, native):
    """All drafts are emitted, so the outputs agree until rounding decides between two tokens.

    A draft layer that attends to wrong rows would differ in its first token.
    """
    if not engines.can_run(native):
        pytest.skip(f"needs a GPU of capability {native.needs_capability} for {native.backend}")
    agreed = differed = 0
    for ours, theirs in zip(answers_of(engines, run), answers_of(engines, native), strict=True):
        pairs = list(zip(ours["generated"], theirs["generated"], strict=True))
        prefix = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        agreed += prefix
        differed += prefix < len(pairs)
    assert agreed / (agreed + differed) >= 0.75
