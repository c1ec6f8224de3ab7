"""Tiny files of DSA models loaded into vLLM's own model classes on the CPU, bit for bit, as any rank of a group."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q

from tests.gguf import loading, tiny

pytestmark = pytest.mark.slow

TYPES = {"F32": Q.F32, "Q8_0": Q.Q8_0, "mixed": tiny.MIXED}
SUPPORTED = [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K]
SUPPORTED += [Q.IQ1_S, Q.IQ1_M, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S, Q.IQ4_NL, Q.IQ4_XS]
MATRICES = [name for name in tiny.MIXED if not name.startswith(("blk", "token_embd", "output"))]
MATRICES += ["attn_q_b", "attn_kv_a_mqa", "attn_k_b", "attn_v_b", "indexer.attn_q_b", "indexer.attn_k"]
SMALL = {"num_hidden_layers": 2, "intermediate_size": 256, "moe_intermediate_size": 256}


@pytest.fixture(scope="module")
def vllm() -> Iterator[ProcessPoolExecutor]:
    """A process with vLLM and the plugin, and a fake GPU."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=loading.install) as pool:
        yield pool


@pytest.fixture
def problems(vllm: ProcessPoolExecutor, tmp_path: Path):
    def ask(**options) -> list[str]:
        return vllm.submit(loading.check, tmp_path, **options).result()

    return ask


@pytest.mark.parametrize(("types", "tp_size"), [("F32", 1), ("F32", 2), *product(["Q8_0", "mixed"], [1, 2, 4, 8])])
def test_every_weight_of_a_rank(types: str, tp_size: int, problems) -> None:
    assert problems(types=TYPES[types], tp_size=tp_size) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arch", ["glm-dsa", "deepseek32"])
def test_shards_shared_indexers_and_mtp(arch: str, dtype: str, problems) -> None:
    """What a published GLM-5.2 has: indexers that the model has not, a block that the model leaves to its draft."""
    options = {"arch": arch, "dtype": dtype, "types": tiny.MIXED, "shards": 4, "mtp": True}
    assert problems(shared_indexers=arch == "glm-dsa", **options) == []


@pytest.mark.parametrize("mtp_embeddings", [False, True])
@pytest.mark.parametrize("types", TYPES)
def test_draft_model(types: str, mtp_embeddings: bool, problems) -> None:
    """Without embeddings of its own the MTP block uses the model's."""
    options = {"types": TYPES[types], "mtp_embeddings": mtp_embeddings, "tp_size": 2}
    assert problems(draft=True, shared_indexers=True, **options) == []


def test_every_supported_type(problems) -> None:
    """A block for each type."""
    types = {f"blk.{block}.{name}": each for block, each in enumerate(SUPPORTED) for name in MATRICES}
    assert problems(types=types, **SMALL | {"num_hidden_layers": len(SUPPORTED)}) == []


@pytest.mark.parametrize(
    "types",
    [
        {"attn_q_a": Q.F16},
        {"attn_kv_a_mqa": Q.F32},
        {"ffn_gate": Q.BF16, "ffn_up_shexp": Q.F16},
        {"ffn_down_exps": Q.BF16},
        {"ffn_gate_exps": Q.F16},
        {"token_embd": Q.F16, "output": Q.BF16, "indexer.attn_k": Q.F16, "attn_k_b": Q.BF16, "attn_v_b": Q.Q4_K},
        {"indexer.proj": Q.Q8_0, "nextn.eh_proj": Q.Q4_K},
    ],
    ids=lambda types: ",".join(f"{name}={each.name}" for name, each in types.items()),
)
def test_float_tensors_among_quantised_ones(types: dict[str, Q], problems) -> None:
    """A layer that is float in part is float: no kernel takes both."""
    assert problems(types=types, tp_size=2, **SMALL) == []


def test_a_parameter_without_a_value_ends_the_loading(vllm: ProcessPoolExecutor, tmp_path: Path) -> None:
    lost = "model.layers.1.mlp.gate.weight"
    [problem] = vllm.submit(loading.check_without, tmp_path, lost, **SMALL).result()
    assert problem.startswith(
        f"GGUFFileError: {tmp_path / 'model.gguf'}: nothing in these files is for 1 parameters of "
    )
    assert lost in problem


def test_tensors_are_views_of_the_file(vllm: ProcessPoolExecutor, tmp_path: Path) -> None:
    """All that is not dequantised is handed over where it is, and so read only where the model copies from it."""
    copied = vllm.submit(loading.copied_weights, tmp_path, types=tiny.MIXED, **SMALL).result()
    dequantized = ("kv_b_proj.weight", "indexer.wk.weight", "qweight_type")
    assert {name for name in copied if not name.endswith(dequantized)} == set()
    assert "model.layers.0.self_attn.kv_b_proj.weight" in copied
