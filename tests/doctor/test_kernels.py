"""Which kernels the doctor says that the layers take, and a model that vLLM refuses to build."""

import json

import pytest

from .conftest import CONFIGS

FP8_ONLINE = ("--quantization", "fp8")


def kernels(answer) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in answer["kernels"]:
        found.setdefault(row["name"], set()).add(row["value"])
    return found


@pytest.mark.parametrize(
    ("model", "options", "experts"),
    [
        # DeepGEMM's experts write bfloat16 only: the distribution's own gate (gates.py).
        ("deepseek_v32", ("--capability", "12.0", "--dtype", "float16"), "TRITON"),
        ("deepseek_v32", ("--capability", "8.0", "--dtype", "bfloat16"), "MARLIN"),
        ("glm5", ("--capability", "8.6", *FP8_ONLINE), "MARLIN"),
    ],
)
def test_experts(doctor, model, options, experts):
    answer = doctor(model, *options, sections=("kernels",))
    assert kernels(answer)["MoE experts"] == {experts}
    row = next(row for row in answer["kernels"] if row["name"] == "MoE experts")
    assert row["why"].startswith({"deepseek_v32": "58 layers, ", "glm5": "75 layers, "}[model])


def test_layers_without_quantisation(doctor):
    answer = doctor("llama", "--capability", "8.6", sections=("kernels",))
    assert [(row["name"], row["value"], row["why"]) for row in answer["kernels"]] == [
        ("embedding, output", "torch (cuBLAS)", "2 layers, UnquantizedEmbeddingMethod"),
        ("linear layers", "torch (cuBLAS)", "128 layers, UnquantizedLinearMethod"),
    ]


def test_a_kernel_that_a_quantisation_method_chose(doctor, tmp_path):
    config = json.loads((CONFIGS / "llama/config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = doctor(tmp_path, "--capability", "8.6", sections=("kernels",))
    assert kernels(answer)["linear layers"] == {"MarlinLinearKernel"}


def test_what_a_constructor_refuses_is_the_verdict(doctor):
    """Upstream's selector takes FLASHMLA_SPARSE here, whose constructor ends the start."""
    options = ("--capability", "9.0", "-tp", "8", "-dcp", "8", "--dtype", "bfloat16")
    answer = doctor("glm5", *options, sections=("kernels", "memory"))
    assert (answer["chosen"], answer["command"], answer["exit"]) == ("FLASHMLA_SPARSE", None, 3)
    assert "DCP for FlashMLA sparse requires an fp8_ds_mla kv-cache" in answer["reason"]
    assert answer["kernels"] == answer["memory"] == []
