"""Whose kernels the doctor says that score the keys."""

import pytest


def indexer(doctor, *arguments) -> dict[str, dict]:
    return {row["name"]: row for row in doctor(*arguments, sections=("indexer",))["indexer"]}


@pytest.mark.parametrize(("capability", "software"), [("8.0", True), ("8.6", True), ("8.9", False)])
def test_gpus_without_deep_gemm(doctor, capability, software):
    rows = indexer(doctor, "glm5", "--capability", capability)
    assert rows["logits"]["value"] == "Triton"
    assert rows["logits"]["why"] == f"DeepGEMM has no kernels for compute capability {capability}"
    assert "nvcc" not in rows
    assert ("8-bit values" in rows) == software


@pytest.mark.parametrize("capability", ["9.0", "12.0", "12.1"])
def test_nvcc_decides(doctor, capability):
    """Whether this machine has one is not for a test to say."""
    rows = indexer(doctor, "glm5", "--capability", capability)
    assert rows["logits"]["value"] == ("DeepGEMM" if rows["nvcc"]["value"] else "Triton")
    assert "this machine" in rows["nvcc"]["why"]


def test_sm100_has_no_other_path(doctor):
    assert indexer(doctor, "glm5", "--capability", "10.0")["logits"]["value"] == "DeepGEMM"


@pytest.mark.parametrize("model", ["llama", "deepseek_v3"])
def test_a_model_that_reads_every_key_has_none(doctor, model):
    assert indexer(doctor, model, "--capability", "12.0") == {}
