"""What rounded inputs cost, and that the checks of the engine's logits see a faulty kernel. On the CPU."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from tests.gguf import tiny
from tests.gpu import tiny_gguf
from tests.gpu.positions import Positions
from tests.gpu.prompts import tokens
from tests.gpu.test_gguf_engine import HEADLINE, check
from tests.gpu.tiny_gguf import BLOCK, Rounding, TinyGguf, minima

LENGTH = 17


def linear(x: torch.Tensor, weight: torch.Tensor, own: torch.Tensor | None, *, many_tokens: bool = True, seed: int = 0):
    rounding = Rounding({weight.untyped_storage().data_ptr(): own}, seed)
    rounding.many_tokens = many_tokens
    with rounding:
        return torch.nn.functional.linear(x, weight)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_inputs_become_whole_numbers_times_a_scale():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    rounded = linear(x, torch.eye(256), None)
    scale = x.unflatten(-1, (-1, BLOCK)).abs().amax(dim=-1, keepdim=True) / 127
    steps = ((rounded - x).unflatten(-1, (-1, BLOCK)) / scale).abs()
    assert steps.max() <= 0.5 + 127 * 2**-11  # the scale is a float16
    assert steps.square().mean().sqrt().item() == pytest.approx(12**-0.5, rel=0.03)
    assert not torch.equal(rounded, linear(x, torch.eye(256), None, seed=1))
    assert torch.equal(linear(torch.zeros(1, 256), torch.eye(256), None), torch.zeros(1, 256))


def test_other_weights_are_left_alone():
    x, weight, other = torch.randn(3, 256), torch.randn(8, 256), torch.randn(8, 256)
    with Rounding({weight.untyped_storage().data_ptr(): None}, 0) as rounding:
        assert torch.equal(torch.nn.functional.linear(x, other), x @ other.T)
        assert not torch.equal(torch.nn.functional.linear(x, weight), x @ weight.T)
    assert rounding.seen == {weight.untyped_storage().data_ptr()}


@pytest.fixture
def write_matrix(tmp_path):
    """Write a file with one matrix [8, 512] of a type; return it dequantised, and the file."""

    def write(weight_type: Q) -> tuple[torch.Tensor, list]:
        rng = np.random.default_rng(0)
        data = tiny.quantize(rng.standard_normal((8, 512), np.float32), weight_type, rng)
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "glm-dsa")
        writer.add_tensor("output.weight", data, raw_dtype=weight_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        weight = torch.from_numpy(gguf.quants.dequantize(data, weight_type).reshape(8, 512).copy())
        return weight, [tmp_path / "model.gguf"]

    return write


@pytest.mark.parametrize("weight_type", [Q.Q4_K, Q.Q5_K])
def test_minima_make_errors_larger(write_matrix, weight_type):
    weight, files = write_matrix(weight_type)
    own = minima(files)["output.weight"]
    # A weight plus its minimum is a positive number, and now and then 0.
    positive = weight.unflatten(-1, (-1, BLOCK)) + own[..., None]
    assert own.shape == (8, 512 // BLOCK)
    assert positive.min() == pytest.approx(0, abs=1e-5)
    x = torch.randn(2000, 512, generator=torch.Generator().manual_seed(1))
    many, few, plain = (
        relative_error(linear(x, weight, each, many_tokens=many_tokens), x @ weight.T)
        for each, many_tokens in ((own, True), (own, False), (None, True))
    )
    assert few == plain
    # The errors of the inputs meet the positive numbers.
    assert many / few == pytest.approx((positive.norm() / weight.norm()).item(), rel=0.05)


def test_types_without_minima_have_none(write_matrix):
    _, files = write_matrix(Q.Q6_K)
    assert minima(files) == {}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The mixed file's reference, its logits, and those with rounded inputs but for the last rounding's."""
    reference = TinyGguf(tmp_path_factory.mktemp("mixed"), "mixed").reference
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf, "NUM_ROUNDINGS", 3)
        rounded = reference.rounded(tokens(LENGTH), LENGTH)
    return reference, reference.logprobs(tokens(LENGTH)), rounded


def check_found(found: torch.Tensor, expected: torch.Tensor, rounded: torch.Tensor) -> None:
    positions = {"prompt": Positions.of(found, expected, rounded)}
    check(positions, {"prompt": Positions.of(expected, expected)}, HEADLINE, [])


def drop_last_inputs(layer: torch.nn.Module) -> None:
    layer.self_attn.o_proj.weight[:, -BLOCK:] = 0


def shift_rows_of_an_expert(layer: torch.nn.Module) -> None:
    weight = layer.mlp.experts.down_proj[1]
    weight.copy_(weight.roll(1, dims=0))


@pytest.mark.slow
def test_a_right_engine_passes(model):
    _, expected, rounded = model
    check_found(rounded[-1], expected, rounded[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("plant", [drop_last_inputs, shift_rows_of_an_expert])
def test_a_faulty_kernel_does_not_pass(model, monkeypatch, plant):
    reference, expected, rounded = model
    weights = {name: weight.clone() for name, weight in reference._model.state_dict().items()}
    monkeypatch.setattr(tiny_gguf, "NUM_ROUNDINGS", 1)
    monkeypatch.setattr(reference, "_rounded", {})
    try:
        with torch.no_grad():
            plant(reference._model.model.layers[2])
        found = reference.rounded(tokens(LENGTH), LENGTH)[0]
    finally:
        reference._model.load_state_dict(weights)
    with pytest.raises(AssertionError, match="off, at most"):
        check_found(found, expected, rounded[:-1])


@pytest.mark.slow
def test_drafts_are_rounded_as_well(model, monkeypatch):
    reference, _, _ = model
    monkeypatch.setattr(tiny_gguf, "NUM_ROUNDINGS", 1)
    text = tokens(LENGTH)
    found = Positions.of(reference.rounded_draft_logits(text, LENGTH)[0], reference.draft_logits(text))
    assert 0.01 < found.error() < 0.1
