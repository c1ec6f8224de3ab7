"""What becomes of a file's tensors on the way into a model: their names, tied embeddings, float types."""

from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q


def write(path: Path, names: list[str], metadata=lambda writer: None) -> Path:
    """Write a file with a Q8_0 tensor [1, 32] for each name."""
    writer = gguf.GGUFWriter(path, "llama")
    metadata(writer)
    for name in names:
        writer.add_tensor(name, np.zeros((1, 34), np.uint8), raw_dtype=Q.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_shards(folder: Path, shards: list[list[str]]) -> list[Path]:
    def split(number: int):
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", len(shards))
            writer.add_int32("split.tensors.count", sum(map(len, shards)))

        return add

    name = "m-Q8_0-{:05}-of-{:05}.gguf"
    return [
        write(folder / name.format(number + 1, len(shards)), names, split(number))
        for number, names in enumerate(shards)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.indexer.weights_proj.weight", "layers.0.indexer.weights_proj.qweight"),
        ("weight_mixer.weight", "weight_mixer.qweight"),
        ("mm_input_projection_weight", "mm_input_projection_qweight"),
        ("lm_head.weight", "lm_head.qweight"),
    ],
)
def test_only_the_end_of_a_name_is_renamed(name, expected, tmp_path):
    from vllm_gguf_plugin.weight_utils import gguf_quant_weights_iterator

    file = write(tmp_path / "m.gguf", ["blk.0.x.weight"])
    weights = dict(gguf_quant_weights_iterator(file, {"blk.0.x.weight": name}))
    assert list(weights) == [f"{expected}_type", expected]
    assert weights[f"{expected}_type"] == Q.Q8_0
    assert weights[expected].shape == (1, 34)


SHARDS = {
    "metadata only first": ([[], ["token_embd.weight"], ["output.weight"]], False),
    "in the first": ([["output.weight"], ["token_embd.weight"]], False),
    "nowhere": ([["token_embd.weight"], ["output_norm.weight"]], True),
}


@pytest.mark.parametrize(("shards", "tied"), SHARDS.values(), ids=SHARDS)
def test_embeddings_are_tied_if_no_file_has_an_output_matrix(shards, tied, tmp_path):
    from transformers import PretrainedConfig
    from vllm_gguf_plugin.gguf_utils import maybe_patch_hf_config_from_gguf
    from vllm_gguf_plugin.weights_adapter import GGUFWeightsAdapter

    files = write_shards(tmp_path, shards)
    config = maybe_patch_hf_config_from_gguf(str(files[0]), PretrainedConfig(tie_word_embeddings=not tied))
    assert config.tie_word_embeddings is tied, "by the configuration"

    config = PretrainedConfig(tie_word_embeddings=not tied)
    names = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    GGUFWeightsAdapter(config).update_tie_word_embeddings(str(files[0]), config, names)
    assert config.tie_word_embeddings is tied, "by the adapter"


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float_weights_leave_the_activations_in_their_dtype(dtype, weight_dtype):
    from vllm_gguf_plugin.quantization.linear import _fused_mul_mat_gguf, _fused_mul_mat_gguf_fake
    from vllm_gguf_plugin.quantization.vocal_embeds import _apply_gguf_embedding, _apply_gguf_embedding_fake

    x, weight = torch.randn(3, 32, dtype=dtype), torch.randn(8, 32, dtype=weight_dtype)
    y = _fused_mul_mat_gguf(x, weight, Q.F32)
    assert y.dtype == _fused_mul_mat_gguf_fake(x, weight, Q.F32).dtype == dtype
    torch.testing.assert_close(y, x @ weight.to(dtype).T)

    ids = torch.tensor([7, 0])
    y = _apply_gguf_embedding(ids, weight, Q.F32, 32, dtype)
    assert y.dtype == _apply_gguf_embedding_fake(ids, weight, Q.F32, 32, dtype).dtype == dtype
    torch.testing.assert_close(y, weight[ids].to(dtype))


def test_a_quantised_embedding_is_dequantised_to_the_models_dtype(monkeypatch):
    from vllm_gguf_plugin.quantization import vocal_embeds

    asked = []
    monkeypatch.setattr(
        vocal_embeds,
        "ops",
        SimpleNamespace(
            ggml_dequantize=lambda w, t, m, n, dtype: asked.append(dtype) or torch.zeros(n, m, dtype=dtype)
        ),
    )
    weight = torch.zeros(8, 34, dtype=torch.uint8)
    y = vocal_embeds._apply_gguf_embedding(torch.tensor([1, 2]), weight, Q.Q8_0, 32, torch.float16)
    assert asked == [torch.float16]
    assert y.dtype == torch.float16
