"""An engine's logits beside the reference's: how far off they are, and which of its choices are wrong beyond doubt.

Logits are compared but for what all of a position have in common, which log-probabilities do not tell: every
position's mean is taken off.
"""

from dataclasses import dataclass
from typing import Any

import torch

# A preference for one token to another is beyond doubt where it is that many times its rms error.
DECIDED = 5


def wrong_choices(
    expected: torch.Tensor,
    chosen: torch.Tensor,
    error: float,
    *,
    rounded: torch.Tensor | None = None,
    twin: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return where the reference prefers another token to the one chosen, beyond doubt: bool [positions].

    Some positions, and some pairs of tokens, are off by many times what others are: an error that several blocks have
    in common shifts two logits by different amounts. So what counts is the rms error of the very preference of one
    token to another at this position, if that is larger than the one over all positions.

    Args:
        expected: The reference's logits, fp32 [positions, vocabulary]
        chosen: The tokens chosen, int64 [positions]
        error: The rms error of preferences over all positions
        rounded: Logits whose differences from `expected` are errors of the size to be expected, each as good as the
            others: fp32 [roundings, positions, vocabulary]
        twin: Logits whose differences from `expected` come on top of that, fp32 [positions, vocabulary]

    """
    pairs = torch.stack([expected.argmax(dim=-1), chosen], dim=-1)
    preference = _preference(expected, pairs)
    own = torch.zeros_like(preference)
    if rounded is not None and len(rounded):
        own += (_preference(rounded, pairs) - preference).square().mean(dim=0)
    if twin is not None:
        own += (_preference(twin, pairs) - preference).square()
    return preference > DECIDED * own.sqrt().clamp(min=error)


def _preference(logits: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the first token's logit less the second's: [..., positions] for logits [..., positions, vocabulary]."""
    first, second = logits.gather(-1, pairs.expand(*logits.shape[:-1], 2)).unbind(dim=-1)
    return first - second


def second_best(logits: torch.Tensor) -> torch.Tensor:
    return logits.topk(2).indices[:, 1]


@dataclass
class Positions:
    """Logits of an engine and of the reference at the same positions, fp32 [positions, vocabulary]; means are 0.

    `rounded` [roundings, positions, vocabulary] are the reference's with inputs rounded as the engine's kernels round
    them; there are none if these round nothing.
    """

    found: torch.Tensor
    expected: torch.Tensor
    rounded: torch.Tensor

    @classmethod
    def of(cls, found: torch.Tensor, expected: torch.Tensor, rounded: torch.Tensor | None = None) -> "Positions":
        rounded = expected.new_empty(0, *expected.shape) if rounded is None else rounded
        assert found.shape == expected.shape == rounded.shape[1:]
        return cls(*(x - x.mean(dim=-1, keepdim=True) for x in (found.float(), expected.float(), rounded.float())))

    @classmethod
    def cat(cls, parts: list["Positions"]) -> "Positions":
        return cls(
            torch.cat([part.found for part in parts]),
            torch.cat([part.expected for part in parts]),
            torch.cat([part.rounded for part in parts], dim=1),
        )

    def __getitem__(self, rows: slice) -> "Positions":
        return Positions(self.found[rows], self.expected[rows], self.rounded[:, rows])

    def __len__(self) -> int:
        return len(self.found)

    def cosine(self) -> float:
        found, expected = (x.double().flatten() for x in (self.found, self.expected))  # in float32 it can exceed 1
        return torch.cosine_similarity(found, expected, dim=0).item()

    def error(self) -> float:
        """Return the rms error of a logit."""
        return (self.found - self.expected).square().mean().sqrt().item()

    def rounding_error(self) -> float:
        """Return the rms error of a logit in the worst of the roundings; 0 if there are none."""
        errors = (self.rounded - self.expected).square().mean(dim=(1, 2)).sqrt()
        return errors.max().item() if len(errors) else 0.0

    def margin_error(self) -> float:
        """Return the rms error of the margin between the reference's two best tokens."""
        pairs = self.expected.topk(2).indices
        return (_preference(self.found, pairs) - _preference(self.expected, pairs)).square().mean().sqrt().item()

    def wrong(self, twin: torch.Tensor | None = None) -> torch.Tensor:
        """Return where the engine's best token is wrong beyond doubt; `twin` as in `wrong_choices`."""
        return self._beyond_doubt(self.found.argmax(dim=1), twin)

    def decided(self, twin: torch.Tensor | None = None) -> torch.Tensor:
        """Return where no other token could be the best one."""
        return self._beyond_doubt(second_best(self.expected), twin)

    def _beyond_doubt(self, chosen: torch.Tensor, twin: torch.Tensor | None) -> torch.Tensor:
        return wrong_choices(self.expected, chosen, self.margin_error(), rounded=self.rounded, twin=twin)

    def argmaxes(self, twin: torch.Tensor | None = None) -> dict[str, Any]:
        """Return the share of the positions that are decided, and the numbers of other argmaxes."""
        return {
            "argmax_decided": self.decided(twin).float().mean().item(),
            "argmax_wrong_decided": int(self.wrong(twin).sum()),
            "argmax_wrong": int((self.found.argmax(dim=1) != self.expected.argmax(dim=1)).sum()),
        }
