"""Which backend the doctor says, that it is the one vLLM takes, and that its cures cure."""

import re
from itertools import product

import pytest

OURS = "TRITON_MLA_SPARSE"
CAPABILITIES = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "12.1"]
DTYPES = ["float16", "bfloat16"]
KV_CACHE_DTYPES = ["auto", "fp8", "fp8_ds_mla"]
# What the attention layers of each model tell vLLM.
LAYERS = {
    "glm5": {"head_size": 576, "use_mla": True, "use_sparse": True, "num_heads": 64},
    "deepseek_v32": {"head_size": 576, "use_mla": True, "use_sparse": True, "num_heads": 128},
    "deepseek_v3": {"head_size": 576, "use_mla": True, "num_heads": 128},
    "glm5next": {"head_size": 512, "use_mla": True, "use_sparse": True, "num_heads": 8},
    "llama": {"head_size": 128},
}
MATRIX = [
    *product(["glm5"], CAPABILITIES, DTYPES, KV_CACHE_DTYPES),
    *product(["deepseek_v32", "deepseek_v3", "glm5next", "llama"], CAPABILITIES, DTYPES, ["auto"]),
]


@pytest.mark.parametrize("question", MATRIX, ids="-".join)
def test_the_doctors_choice_is_the_selectors(doctor, question):
    model, capability, dtype, kv_cache_dtype = question
    options = ("--capability", capability, "--dtype", dtype, "--kv-cache-dtype", kv_cache_dtype)
    answer = doctor(model, *options)
    selected = doctor.select(LAYERS[model], model, *options)
    assert answer["chosen"] == (None if selected.startswith("No valid attention backend") else selected)
    assert answer["exit"] == (3 if answer["chosen"] is None else 0)
    for backend in answer["backends"]:
        assert backend["fits"] is not bool(backend["reasons"])
        assert not any("Error: " in reason for reason in backend["reasons"]), "refused because the GPU is pretended"


def test_the_headline(doctor):
    """GLM-5 in float16 on SM120: what upstream refuses, why, and what serves it."""
    answer = doctor("glm5", "--gpu", "RTX PRO 6000", "--dtype", "float16")
    assert answer["capability"] == "12.0"
    assert answer["backends"] == [
        {"name": "TRITON_MLA", "fits": False, "reasons": ["sparse not supported"], "cures": []},
        {
            "name": "FLASHINFER_MLA_SPARSE_SM120",
            "fits": False,
            "reasons": ["dtype not supported"],
            "cures": ["--dtype bfloat16"],
        },
        {"name": OURS, "fits": True, "reasons": [], "cures": []},
    ]
    assert (answer["chosen"], answer["exit"]) == (OURS, 0)
    assert answer["command"].endswith("configs/glm5 --dtype float16")


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("glm5", ["--capability", "12.0", "--dtype", "float16"]),
        ("glm5", ["--capability", "12.0", "--kv-cache-dtype", "fp8_e5m2"]),
        ("glm5", ["--capability", "12.0", "--dtype", "bfloat16", "--kv-cache-dtype", "bfloat16"]),
        ("glm5", ["--capability", "12.0", "--dtype", "float16", "--kv-cache-dtype", "float16"]),
        ("glm5", ["--capability", "12.0", "--dtype", "float16", "--block-size", "16"]),
        ("glm5", ["--capability", "12.0", "--dtype", "float16", "-tp", "4", "-dcp", "2"]),
        ("glm5", ["--capability", "8.0", "--kv-cache-dtype", "fp8_e5m2", "--block-size", "32"]),
        ("glm5", ["--capability", "9.0", "--dtype", "float16", "--kv-cache-dtype", "fp8"]),
        ("llama", ["--capability", "8.6", "--kv-cache-dtype", "fp8_e5m2"]),
        ("llama", ["--capability", "12.0", "--block-size", "17"]),
    ],
    ids=str,
)
def test_every_cure_cures(doctor, model, options):
    cured = 0
    for backend in doctor(model, *options)["backends"]:
        for cure in backend["cures"]:
            again = doctor(model, *take(cure, options))
            (row,) = [each for each in again["backends"] if each["name"] == backend["name"]]
            assert row["fits"], (backend, cure, row)
            cured += 1
    assert cured


def take(cure: str, options: list[str]) -> list[str]:
    """Return the options after a cure such as `--dtype bfloat16 without --block-size`."""
    short = {"--decode-context-parallel-size": "-dcp"}
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    for flag in re.findall(r"without (--\S+)", cure):
        del pairs[short.get(flag, flag)]
    pairs |= dict(re.findall(r"(?<!without )(--\S+) (?!without)(\S+)", cure))
    return [word for pair in pairs.items() for word in pair]


def test_no_cure_is_made_up(doctor):
    """A GPU without kernels stays without."""
    answer = doctor("glm5", "--capability", "7.5")
    assert answer["exit"] == 3
    assert not any(backend["cures"] for backend in answer["backends"])
    assert answer["reason"] == "no attention backend fits this model on this GPU, whatever the options"


def test_the_nearest_cure_is_the_verdict(doctor):
    answer = doctor("glm5", "--capability", "8.6", "--kv-cache-dtype", "fp8_e5m2")
    assert (answer["exit"], answer["chosen"], answer["command"]) == (3, None, None)
    assert answer["reason"] == f"no attention backend fits; cure: --kv-cache-dtype fp8 ({OURS})"


def test_a_missing_package_is_a_cure(doctor):
    answer = doctor.without_flashinfer("glm5", "--capability", "12.0")
    (row,) = [each for each in answer["backends"] if each["name"] == "FLASHINFER_MLA_SPARSE_SM120"]
    assert row["reasons"] == ["FLASHINFER_MLA_SPARSE_SM120 requires FlashInfer's sparse MLA decode API"]
    assert row["cures"] == ["pip install -U flashinfer-python"]


def test_a_backend_that_was_asked_for_is_the_only_one(doctor):
    options = ("--capability", "12.0", "--dtype", "float16", "--attention-backend")
    assert doctor("glm5", *options, OURS.lower())["chosen"] == OURS
    refused = doctor("glm5", *options, "FLASHINFER_MLA_SPARSE_SM120")
    assert (refused["chosen"], refused["exit"]) == (None, 3)
    assert refused["reason"].endswith(f"without the option it takes {OURS}")
    # One that vLLM would not try by itself here.
    other = doctor("glm5", *options, "FLASHMLA_SPARSE")
    assert other["backends"][-1]["name"] == "FLASHMLA_SPARSE"
    assert "compute capability not supported" in other["backends"][-1]["reasons"]
