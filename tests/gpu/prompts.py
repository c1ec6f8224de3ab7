"""Requests with known continuations, and how far an engine's answers to them are from the reference.

A prompt of a given length always has the same random tokens, and so have the
tokens after it. Decoding is forced along these (vLLM's trace replay), so that
whatever runs a prompt is compared with one and the same reference.
"""

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.tiny_glm import INDEX_TOPK, VOCAB_SIZE, Reference

NUM_FORCED = 64

Request = dict[str, Any]  # see run_engine.py
Answer = dict[str, Any]


@functools.cache
def tokens(length: int) -> list[int]:
    """Return the prompt of `length` tokens and the NUM_FORCED tokens after it."""
    rng = random.Random(length)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length + NUM_FORCED)]


def prefill(length: int) -> Request:
    """Ask for the log-probabilities of a prompt."""
    return {"prompt": tokens(length)[:length], "num_generated": 1, "prompt_logprobs": True}


def decode(length: int, *, after_steps: int = 0, cached: bool = False) -> Request:
    """Ask for the log-probabilities of the tokens after a prompt, decoded one by one."""
    return {
        "prompt": tokens(length)[:length],
        "forced": tokens(length)[length:],
        "after_steps": after_steps,
        "skip_cache": not cached,
    }


def generate(length: int, num_generated: int) -> Request:
    """Ask for greedy tokens."""
    return {"prompt": tokens(length)[:length], "num_generated": num_generated}


@dataclass
class Errors:
    """Mean |difference| of log-probabilities from the reference's, for one prompt."""

    mean: float  # over the prompt
    past_topk: float | None  # over its tokens that see more than top-k others, if it has any
    decode: float  # over the tokens after it

    def __add__(self, other: "Errors") -> "Errors":
        past_topk = None if self.past_topk is None else self.past_topk + other.past_topk
        return Errors(self.mean + other.mean, past_topk, self.decode + other.decode)


def summarize(prompt: torch.Tensor, decoded: torch.Tensor) -> Errors:
    """Return the errors of a prompt [length - 1] and of the tokens after it [NUM_FORCED]."""
    past_topk = prompt[INDEX_TOPK:].mean().item() if len(prompt) > INDEX_TOPK else None
    return Errors(prompt.mean().item(), past_topk, decoded.mean().item())


def prefill_errors(answer: Answer, length: int, reference: Reference) -> torch.Tensor:
    """Return |difference| [length - 1] for an answer to `prefill`."""
    return (torch.tensor(answer["prompt_logprobs"]) - reference.chosen(tokens(length))[: length - 1]).abs()


def decode_errors(answer: Answer, length: int, reference: Reference) -> torch.Tensor:
    """Return |difference| [NUM_FORCED] for an answer to `decode`."""
    assert answer["generated"] == tokens(length)[length:], "decoding was not forced"
    return (torch.tensor(answer["logprobs"]) - reference.chosen(tokens(length))[length - 1 :]).abs()


def rounding_errors(length: int, kv: str, reference: Reference) -> Errors:
    """Return what rounding the KV values to a cache format costs, everything else being in float32."""
    difference = (reference.chosen(tokens(length), kv) - reference.chosen(tokens(length))).abs()
    return summarize(difference[: length - 1], difference[length - 1 :])


def shared_selections(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return how many of the positions in each row of `found` are in that of `expected`: int64 [rows].

    Both int32 [rows, top-k]; a row's positions differ from each other.
    """
    is_expected = torch.zeros(len(expected), int(max(found.max(), expected.max())) + 1, dtype=torch.bool)
    is_expected.scatter_(1, expected.long(), True)
    return is_expected.gather(1, found.long()).sum(dim=1)


def both(lengths: Iterable[int]) -> list[Request]:
    """Return `prefill` and `decode` of every length, alternating."""
    return [ask(length) for length in lengths for ask in (prefill, decode)]


def errors_of_both(answers: list[Answer], lengths: list[int], reference: Reference) -> dict[int, Errors]:
    """Return the errors of the answers to `both(lengths)` by length."""
    return {
        length: summarize(
            prefill_errors(answers[2 * i], length, reference), decode_errors(answers[2 * i + 1], length, reference)
        )
        for i, length in enumerate(lengths)
    }
