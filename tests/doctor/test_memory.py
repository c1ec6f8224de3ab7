"""What the doctor says of a GPU's memory, against numbers that do not come from vLLM."""

import pytest

GIB = 2**30
LLAMA_8B = 8_030_261_248 * 2  # bytes of the published model's parameters, in 16 bits
LLAMA_TOKEN = 32 * 2 * 8 * 128 * 2  # layers, K and V, KV heads, head size, bytes


def memory(doctor, *arguments) -> dict[str, dict]:
    return {row["name"]: row for row in doctor(*arguments, sections=("memory",))["memory"]}


def test_the_cache_of_glm5(doctor):
    """Each layer keeps a row of the latent, and 132 bytes for its indexer (docs/install.md)."""
    rows = memory(doctor, "glm5", "--capability", "12.0", "--dtype", "float16", "-tp", "8")
    sizes = {name: row["value"] for name, row in rows.items() if name.startswith("KV ")}
    assert sizes == {
        "KV auto": 78 * (1152 + 132),
        "KV fp8": 78 * (576 + 132),
        "KV fp8_ds_mla": 78 * (656 + 132),
    }
    assert rows["KV auto"]["why"] == "as do float16; TRITON_MLA_SPARSE"
    assert rows["largest context"]["value"] == "unknown"


def test_a_backend_may_read_a_format_as_another(doctor):
    rows = memory(doctor, "glm5", "--capability", "12.0", "--dtype", "bfloat16", "-tp", "8")
    assert rows["KV auto"]["value"] == 78 * (656 + 132)
    assert rows["KV auto"]["why"] == "as do fp8, fp8_e4m3, fp8_ds_mla; FLASHINFER_MLA_SPARSE_SM120"
    assert rows["KV bfloat16"]["why"] == "TRITON_MLA_SPARSE"


def test_a_model_that_fits(doctor):
    options = ("--capability", "8.6", "--memory", "24", "--gpu-memory-utilization", "0.9")
    rows = memory(doctor, "llama", *options)
    assert rows["weights per GPU"]["value"] == pytest.approx(LLAMA_8B / GIB, rel=1e-4)
    room = 24 * GIB * 0.9 - LLAMA_8B
    assert rows["left for the KV cache"]["value"] == pytest.approx(room / GIB, abs=0.01)
    assert rows["KV auto"]["value"] == LLAMA_TOKEN
    assert rows["largest context"]["value"] == pytest.approx(room / LLAMA_TOKEN, abs=64)


def test_two_gpus_share_weights_and_heads(doctor):
    rows = memory(doctor, "llama", "--capability", "8.6", "-tp", "2")
    assert rows["weights per GPU"]["value"] == pytest.approx(LLAMA_8B / 2 / GIB, rel=1e-3)
    assert rows["KV auto"]["value"] == LLAMA_TOKEN // 2


def test_weights_that_vllm_quantises_itself(doctor):
    rows = memory(doctor, "llama", "--capability", "8.9", "--quantization", "fp8")
    embeddings = 2 * 128256 * 4096
    assert rows["weights per GPU"]["value"] == pytest.approx((LLAMA_8B + 2 * embeddings) / 2 / GIB, rel=1e-3)


def test_a_model_that_is_too_large(doctor):
    """GLM-5 has 744e9 parameters, 86.6 GiB for each of 16 GPUs; what every GPU has whole makes it too many for 16."""
    rows = memory(doctor, "glm5", "--gpu", "RTX PRO 6000", "-tp", "8", "--dtype", "float16")
    assert rows["weights per GPU"]["value"] == pytest.approx(744e9 * 2 / 8 / GIB, rel=0.02)
    assert rows["left for the KV cache"]["value"] < 0
    assert rows["GPUs needed"]["value"] == 32
    assert rows["largest context"]["value"] == 0


def test_a_command_with_as_many_gpus_as_the_weights_need(doctor):
    report = doctor("llama", "--capability", "8.6", "--memory", "12", sections=("memory",))
    assert report["exit"] == 0
    assert report["command"].endswith("--tensor-parallel-size 2")


def test_too_few_gpus_are_a_reason(doctor):
    report = doctor("llama", "--capability", "8.6", "--memory", "12", "-tp", "1", sections=("memory",))
    assert (report["exit"], report["command"]) == (3, None)
    assert "the weights take 15 GiB of each GPU" in report["reason"]
    assert report["reason"].endswith("GPUs needed: 2")
