"""The query and key projections of a Llama file, whose rows llama.cpp reorders for its form of RoPE."""

from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 64


def rotate(x: torch.Tensor, *, neighbours: bool) -> torch.Tensor:
    """Apply RoPE to x [tokens, heads, HEAD_DIM]: to values next to each other, or half a head apart."""
    angles = torch.arange(len(x))[:, None, None] * 100.0 ** -torch.linspace(0, 1, HEAD_DIM // 2)
    a, b = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)
    a, b = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.stack((a, b), dim=-1).flatten(-2) if neighbours else torch.cat((a, b), dim=-1)


def scores(q_proj: torch.Tensor, k_proj: torch.Tensor, x: torch.Tensor, *, neighbours: bool) -> torch.Tensor:
    """Return the attention scores [heads, tokens, tokens]."""
    q, k = ((x @ weight.T).unflatten(-1, (-1, HEAD_DIM)) for weight in (q_proj, k_proj))
    q, k = (rotate(each, neighbours=neighbours) for each in (q, k))
    return torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(HEADS // KV_HEADS, dim=1))


@pytest.mark.parametrize("weight_type", [Q.F32, Q.Q8_0])
def test_attention_is_what_llama_cpp_computes_of_the_file(weight_type, tmp_path):
    from vllm_gguf_plugin.weight_utils import gguf_quant_weights_iterator
    from vllm_gguf_plugin.weights_adapter import get_weights_adapter

    rng = np.random.default_rng(0)
    names = {f"blk.0.attn_{half}.weight": f"model.layers.0.self_attn.{half}_proj.weight" for half in "qkv"}
    heads = dict(zip(names, (HEADS, KV_HEADS, KV_HEADS), strict=True))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    written = []
    for name, count in heads.items():
        data = gguf.quants.quantize(rng.standard_normal((count * HEAD_DIM, HIDDEN), np.float32), weight_type)
        writer.add_tensor(name, data, raw_dtype=weight_type)
        written.append(torch.from_numpy(gguf.quants.dequantize(data, weight_type)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    config = SimpleNamespace(model_type="llama", num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    weights = get_weights_adapter(config).map_weights(gguf_quant_weights_iterator(tmp_path / "m.gguf", names))
    loaded = [
        torch.from_numpy(gguf.quants.dequantize(weight.numpy(), weight_type))
        for name, weight in weights
        if not name.endswith("_type")
    ]

    x = torch.from_numpy(rng.standard_normal((5, HIDDEN), np.float32))
    expected = scores(*written[:2], x, neighbours=True)
    assert not torch.allclose(scores(*written[:2], x, neighbours=False), expected, atol=1)
    torch.testing.assert_close(scores(*loaded[:2], x, neighbours=False), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(loaded[2], written[2])
