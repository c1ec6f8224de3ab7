"""Positions and wrong_choices, on made-up logits."""

import pytest
import torch

from tests.gpu.positions import DECIDED, Positions, wrong_choices

ERROR = 0.05


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(200, 64, generator=torch.Generator().manual_seed(0))


def off(logits: torch.Tensor, seed: int, error: float = ERROR) -> torch.Tensor:
    return logits + error * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))


def pair(margin: float) -> torch.Tensor:
    """Return logits of one position, of which token 0 is better than token 1 by `margin`."""
    return torch.tensor([[margin, 0.0, -9.0]])


def test_a_choice_is_wrong_beyond_five_errors():
    chosen = torch.tensor([1])
    assert not wrong_choices(pair(0.99 * DECIDED * ERROR), chosen, ERROR).any()
    assert wrong_choices(pair(1.01 * DECIDED * ERROR), chosen, ERROR).all()
    assert not wrong_choices(pair(9.0), torch.tensor([0]), ERROR).any()


def test_the_error_of_the_very_preference_counts_where_it_is_larger():
    expected, chosen = pair(1.0), torch.tensor([1])
    rounded = torch.stack([pair(1.0 + error) for error in (0.3, -0.3)])
    assert wrong_choices(expected, chosen, ERROR).all()
    assert not wrong_choices(expected, chosen, ERROR, rounded=rounded).any()
    assert not wrong_choices(expected, chosen, ERROR, twin=pair(0.7)).any()
    # The same errors of another pair of tokens do not.
    assert wrong_choices(expected, torch.tensor([2]), ERROR, rounded=rounded).all()
    assert wrong_choices(expected, chosen, ERROR, rounded=torch.stack([pair(1.01)] * 2)).all()


def test_errors_of_the_expected_size_are_right(logits):
    positions = Positions.of(off(logits, 1), logits, torch.stack([off(logits, seed) for seed in range(2, 10)]))
    assert positions.error() == pytest.approx(ERROR, rel=0.1)
    assert positions.rounding_error() == pytest.approx(ERROR, rel=0.1)
    assert positions.margin_error() == pytest.approx(2**0.5 * ERROR, rel=0.2)
    assert not positions.wrong().any()
    assert positions.decided().float().mean() > 0.3


def test_one_position_of_another_token_is_wrong(logits):
    found = off(logits, 1)
    position = int(logits.topk(2).values.diff(dim=1).argmin())  # of the largest margin
    found[position] = found[position - 1]
    positions = Positions.of(found, logits, torch.stack([off(logits, seed) for seed in range(2, 10)]))
    assert positions.wrong().nonzero().flatten().tolist() == [position]
    assert positions.argmaxes()["argmax_wrong_decided"] == 1


def test_rows_stay_together(logits):
    rounded = torch.stack([off(logits, seed) for seed in range(2)])
    positions = Positions.of(off(logits, 2), logits, rounded)
    joined = Positions.cat([positions[:70], positions[70:]])
    assert len(joined) == len(logits)
    for name, value in vars(positions).items():
        assert torch.equal(getattr(joined, name), value)


def test_what_a_position_has_in_common_does_not_count(logits):
    positions = Positions.of(logits + torch.arange(200.0)[:, None], logits)
    assert positions.error() < 1e-4
    assert positions.rounding_error() == 0
    assert positions.cosine() > 0.99999
