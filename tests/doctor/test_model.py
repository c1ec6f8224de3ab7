"""What the doctor knows of a model, where it read that, and what it says of a question that it cannot read."""

import json
import re
from pathlib import Path

import pytest

from .conftest import CACHED, CONFIGS

SM120 = ("--capability", "12.0")


def facts(answer) -> dict:
    return {name: fact["value"] for name, fact in answer["model"]["facts"].items()}


EXPECTED = {
    "glm5": {
        "architecture": "GlmMoeDsaForCausalLM",
        "mla": True,
        "sparse": True,
        "index_topk": 2048,
        "head_size": 576,
        "heads": 64,
        "layers": 78,
        "experts": 256,
        "dtype": "bfloat16",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "max_model_len": 202752,
    },
    "deepseek_v32": {"mla": True, "sparse": True, "head_size": 576, "heads": 128, "quantization": "fp8"},
    "deepseek_v3": {"mla": True, "sparse": False, "head_size": 576, "quantization": "fp8"},
    "glm5next": {"mla": True, "sparse": True, "head_size": 512, "qk_rope_head_dim": 0},
    "llama": {"mla": False, "sparse": False, "head_size": 128, "heads": 32, "kv_heads": 8, "experts": 0},
}


@pytest.mark.parametrize("model", EXPECTED)
def test_a_model_is_what_its_config_says(doctor, model):
    found = facts(doctor(model, *SM120))
    assert EXPECTED[model].items() <= found.items()


def test_every_fact_says_where_it_was_read(doctor):
    read = doctor("glm5", *SM120, "--dtype", "float16", "-tp", "4")["model"]["facts"]
    assert read["dtype"] == {"value": "float16", "source": "--dtype"}
    assert read["index_topk"] == {"value": 2048, "source": "config.json"}
    assert read["heads_per_rank"] == {"value": 16, "source": "tensor parallel size 4"}
    assert all(fact["source"] for fact in read.values())


def test_vllm_chooses_what_was_not_asked_for(doctor):
    """On SM100 vLLM gives GLM-5 an fp8 cache, and on SM75 a model in bfloat16 runs in float16."""
    assert facts(doctor("glm5", "--capability", "10.0"))["kv_cache_dtype"] == "fp8_e4m3"
    assert facts(doctor("llama", "--capability", "7.5"))["dtype"] == "float16"


@pytest.mark.parametrize("form", ["folder", "config.json", "another name", "cached repository"])
def test_a_model_may_be_named_in_every_form(doctor, tmp_path, form):
    config = CONFIGS / "glm5/config.json"
    renamed = tmp_path / "glm-5.json"
    renamed.write_bytes(config.read_bytes())
    model = {"folder": config.parent, "config.json": config, "another name": renamed, "cached repository": CACHED}[form]
    answer = doctor(model, *SM120, "--dtype", "float16")
    assert facts(answer)["architecture"] == "GlmMoeDsaForCausalLM"
    served = model.parent if form in ("config.json", "another name") else model
    assert answer["command"].split()[2] == str(served)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--dtype", "float17"], "--dtype: Input should be 'auto', 'half', 'float16', .*, got 'float17'"),
        (["--kv-cache-dtype", "fp9"], "Invalid kv_cache_dtype: 'fp9'"),
        (["--quantization", "q2"], "Unknown quantization method: q2"),
        (["--attention-backend", "foo"], "Unknown attention backend: 'FOO'"),
        (["--max-model-len", "12q"], "--max-model-len 12q: "),
        (["--speculative-config", "{x"], "--speculative-config is not JSON: "),
    ],
    ids=str,
)
def test_a_value_that_vllm_does_not_know_is_named(doctor, options, problem):
    assert re.match(problem, doctor("glm5", *SM120, *options)["error"])


@pytest.mark.parametrize("content", [None, '{"model_type": ', ""], ids=["missing", "cut off", "empty"])
def test_a_config_that_is_not_readable_is_named(doctor, tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert str(tmp_path) in doctor(tmp_path, *SM120)["error"]


@pytest.mark.parametrize("model", ["/no/such/folder", "no-such-model", "./model.gguf", "org/model.gguf"])
def test_a_model_that_is_nowhere_is_named(doctor, model):
    assert doctor(model, *SM120)["error"].startswith(f"MODEL {model} is no file or folder")


def test_without_a_gpu_one_must_be_named(doctor):
    answer = doctor("glm5")
    if "error" not in answer:
        pytest.skip("needs a machine without an NVIDIA GPU")
    assert answer["error"].startswith("this machine has no NVIDIA GPU to ask about")
    assert "--capability" in answer["cure"]


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("glm5", ["--capability", "12.0", "-tp", "3"], "must be divisible by tensor parallel size (3)"),
        ("llama", ["--capability", "7.5", "--dtype", "bfloat16"], "Bfloat16 is only supported on GPUs with"),
        ("deepseek_v3", ["--capability", "7.0"], "Minimum capability: 75. Current capability: 70"),
    ],
    ids=str,
)
def test_what_vllm_refuses_before_any_backend_is_the_verdict(doctor, model, options, reason):
    answer = doctor(model, *options)
    assert (answer["exit"], answer["command"]) == (3, None)
    assert reason in answer["reason"]
    assert answer["text"].splitlines()[-1] == answer["reason"]


def test_a_model_type_that_nobody_knows_is_the_verdict(doctor, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["FooForCausalLM"], "model_type": "foo"}))
    answer = doctor(tmp_path, *SM120)
    assert answer["exit"] == 3
    assert "`foo`" in answer["reason"]
