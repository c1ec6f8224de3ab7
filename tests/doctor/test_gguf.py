"""What the doctor says of GGUF files: what is in them, and whether all of it can be loaded."""

import gguf
import pytest

from tests.doctor.conftest import CONFIGS
from tests.gguf import header, tiny

Q = gguf.GGMLQuantizationType
OPTIONS = ("--capability", "12.0", "--dtype", "float16", "--tokenizer", "zai-org/GLM-5")
SECTIONS = ("gguf", "memory")


def rows(answer, section="gguf") -> dict[str, dict]:
    return {row["name"]: row for row in answer[section]}


def test_files_and_types(doctor, tmp_path):
    tiny.write(tmp_path, types=tiny.MIXED, shared_indexers=True, mtp=True, shards=3)
    answer = doctor(tmp_path, *OPTIONS, sections=SECTIONS)
    found = rows(answer)
    assert answer["exit"] == 0, answer["reason"]
    assert found["files"]["value"] == 3
    assert "Q5_K 23, IQ2_XXS 8" in found["tensors"]["why"]
    assert found["without MMQ"]["value"] == "IQ2_XXS, IQ3_XXS, IQ4_XS"
    assert found["loading"]["why"] == "GlmDsaGGUFAdapter"
    assert "10 of indexers" in found["not loaded"]["why"]
    assert "27 of multi-token prediction" in found["not loaded"]["why"]
    assert "no kernel for" not in found


def test_the_weights_are_as_large_as_in_the_files(doctor, tmp_path):
    """Except what is decoded: kv_b, and wk, which is fused with a float tensor."""
    written = tiny.write(tmp_path, types=Q.Q8_0)
    expected = 0
    for tensor in gguf.GGUFReader(written.files[0]).tensors:
        decoded = tensor.tensor_type == Q.F32 or any(part in tensor.name for part in ("_k_b", "_v_b", "indexer.attn_k"))
        expected += 2 * tensor.n_elements if decoded else tensor.n_bytes
    answer = doctor(tmp_path, *OPTIONS, sections=SECTIONS)
    weights = rows(answer, "memory")["weights per GPU"]["value"] * 2**30
    assert weights == pytest.approx(expected, rel=0.01)


def test_a_type_without_kernels(doctor, tmp_path):
    tiny.write(tmp_path, types=Q.TQ1_0)
    answer = doctor(tmp_path, *OPTIONS, sections=SECTIONS)
    assert "TQ1_0" in rows(answer)["no kernel for"]["why"]
    assert rows(answer)["loading"]["value"] == "refused"
    assert (answer["exit"], answer["command"]) == (3, None)
    assert "for which there is no kernel" in answer["reason"]


def test_a_missing_tensor(doctor, tmp_path):
    tiny.write(tmp_path, change=lambda tensors: tensors.pop("blk.1.attn_norm.weight"))
    answer = doctor(tmp_path, *OPTIONS, sections=SECTIONS)
    assert "tensor blk.1.attn_norm.weight, which no file has" in answer["reason"]
    assert answer["exit"] == 3


def test_a_missing_shard(doctor, tmp_path):
    tiny.write(tmp_path, shards=3).files[1].unlink()
    answer = doctor(tmp_path, *OPTIONS, sections=SECTIONS)
    assert "of 3 shards only 2 are there, 'model-00002-of-00003.gguf' missing" in answer["reason"]
    assert answer["exit"] == 3


def test_a_config_of_another_model(doctor, tmp_path):
    tiny.write(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "glm_moe_dsa", "num_attention_heads": 3}')
    answer = doctor(tmp_path, *OPTIONS, sections=SECTIONS)
    assert "contradict each other" in answer["reason"]
    assert "num_attention_heads: '8'" in answer["reason"]
    assert answer["exit"] == 3


@pytest.mark.parametrize("option", ["--tokenizer", "--hf-config-path"])
def test_the_config_of_another_architecture_is_read_where_the_plugin_reads_it(doctor, tmp_path, option):
    file = header.write(tmp_path / "x.gguf", {})
    answer = doctor(file, "--capability", "12.0", option, str(CONFIGS / "llama"))
    assert answer["exit"] == 0, answer["reason"]
    facts = answer["model"]["facts"]
    assert facts["architecture"] == {
        "value": "LlamaForCausalLM",
        "source": f"architectures in config.json of {CONFIGS / 'llama'}",
    }


def test_another_architecture_without_a_config(doctor, tmp_path):
    answer = doctor(header.write(tmp_path / "x.gguf", {}), "--capability", "12.0")
    assert answer["exit"] == 3
    assert "Unrecognized model" in answer["reason"]
    assert "cure: --hf-config-path or --tokenizer with the original model" in answer["reason"]


def test_a_checkpoint_has_no_such_section(doctor):
    assert doctor("llama", "--capability", "12.0", sections=("gguf",))["gguf"] == []
