"""Upstream's own tests of sparse MLA backends, run against TRITON_MLA_SPARSE.

The test files are upstream's, read from the patched tree (`make tree`) and never kept here. CHANGES says all that
is changed in them; FILES is what a machine without the tree needs below build/vllm. Upstream's package of tests has
the name of ours, so they run in a process of their own.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.child_pytest import Case, run_pytest
from tests.gpu.results import gpu_slug, write_results

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
TREE = HERE.parents[1] / "build" / "vllm"
SPARSE_TESTS = "tests/v1/attention/test_sparse_mla_backends.py"
FILES = [
    "tests/__init__.py",
    "tests/v1/__init__.py",
    "tests/v1/attention/utils.py",
    "tests/v1/attention/test_mla_backends.py",
    SPARSE_TESTS,
]

# The tests of the file that a backend answers for. The others are about FlashMLA, FlashInfer, FlashAttention, ROCm,
# the HiSparse cache and the indexer, by name.
OF_THE_BACKEND = [
    "test_sparse_backend_decode_correctness",
    "test_sparse_mla_packed_stride",
    "test_sparse_backend_prefill_correctness",
]
OF_WHAT_IT_INHERITS = [
    "test_triton_convert_req_index_to_global_index_decode_only",
    "test_triton_convert_req_index_to_global_index_with_prefill_workspace",
    "test_triton_convert_rejects_req_id_longer_than_token_indices",
    "test_triton_convert_returns_valid_counts",
    "test_index_group_convert_during_piecewise_capture",
    "test_sparse_mla_index_group_converts_decode_indices_once",
    "test_sparse_mla_index_group_falls_back_for_prefill_sized_batch",
    "test_sparse_mla_index_groups_own_distinct_physical_buffers",
    "test_sparse_mqa_plain_lane_wiring",
    "test_sparse_mqa_hisparse_lanes",
    "test_sparse_impl_observes_repointed_indexer_buffer",
    "test_explicit_topk_buffer_supersedes_indexer",
    "test_sparse_mla_common_impl_resolves_buffer_lazily",
]
# Masked prefill is for SM100: it needs FlashAttention 4.
SELECTION = "not (test_sparse_backend_prefill_correctness and masked_mha)"
# Upstream's reasons to skip a case that hold for ours: blocks are multiples of 64, and nvfp4 is for SM100.
SKIPS = {
    "TRITON_MLA_SPARSE does not support block_size=32",
    "TRITON_MLA_SPARSE does not support nvfp4_ds_mla",
}


@dataclass(frozen=True)
class Change:
    """One replacement in upstream's text, everywhere it occurs, which is `count` times."""

    why: str
    old: str
    new: str
    count: int = 1


CHANGES = [
    # Which backend is tested. FlashInfer's stands for any backend in this file, FlashMLA's has cases of its own.
    Change(
        "decode is tested with one backend",
        "SPARSE_BACKENDS = [FlashMLASparseBackend, FlashInferMLASparseTRTLLMBackend]",
        "SPARSE_BACKENDS = [FlashInferMLASparseTRTLLMBackend]",
    ),
    Change("its name", '["FlashMLA", "FlashInferTRTLLM"]', '["TritonMLASparse"]'),
    Change("ours is imported", "mla.flashinfer_mla_sparse import", "mla.triton_mla_sparse import"),
    Change("our backend for FlashInfer's", "FlashInferMLASparseTRTLLMBackend", "TritonMLASparseBackend", 5),
    Change("our implementation for FlashInfer's", "FlashInferMLASparseImpl", "TritonMLASparseImpl", 6),
    Change(
        "our backend for FlashMLA's in a packed fp8_ds_mla cache",
        'FlashMLASparseBackend,\n            "fp8_ds_mla",',
        'TritonMLASparseBackend,\n            "fp8_ds_mla",',
    ),
    Change(
        "our backend for FlashMLA's in dense prefill",
        "if current_platform.is_rocm()\n        else FlashMLASparseBackend",
        "if current_platform.is_rocm()\n        else TritonMLASparseBackend",
    ),
    # What is skipped.
    Change(
        "NoPE is tested with every KV format and on every GPU, not with FlashMLA on SM90 alone",
        "if qk_rope_head_dim == 0 and (\n        backend_cls != FlashMLASparseBackend",
        "if False and (\n        backend_cls != FlashMLASparseBackend",
    ),
    Change(
        "dense prefill is tested before SM100, too",
        'get_device_capability()[0] < 10,\n    reason="Sparse MLA forward_mha',
        'get_device_capability()[0] < 8,\n    reason="Sparse MLA forward_mha',
    ),
    # What is asked.
    Change(
        "the workspace is locked in every case: all scratch has to be reserved before",
        'if backend_cls == FlashMLASparseBackend and kv_cache_dtype == "fp8_ds_mla":\n            from',
        "if True:\n            from",
    ),
    # What the network would have to deliver.
    Change("a local configuration", '"deepseek-ai/DeepSeek-V2-Lite-Chat"', '"{model}"', 4),
    Change("a local configuration where any will do", '"Qwen/Qwen3.5-0.8B"', '"{model}"'),
]
FLOAT16_CHANGES = [
    Change(
        "float16 for bfloat16",
        "device = torch.device(DEVICE_TYPE)\n    dtype = torch.bfloat16\n",
        "device = torch.device(DEVICE_TYPE)\n    dtype = torch.float16\n",
        3,
    ),
    Change(
        "the RoPE tail of fp8_ds_mla is bfloat16 under float16, too; upstream_fixtures.py writes it so",
        "rope_vals = cache_slice.view(dtype)[",
        "rope_vals = cache_slice.view(torch.bfloat16)[",
    ),
    # Seen on the H200: 0.074 in one of two million values, of a NoPE model with 4 heads.
    Change(
        "the reference of fp8_e4m3 is not quantised, so that its rounding is all there is to see: 8 % of a value",
        "backend_output, sdpa_reference, rtol=0.065, atol=0.05",
        "backend_output, sdpa_reference, rtol=0.08, atol=0.05",
    ),
]

# DeepSeek-V2-Lite as far as the tests read it: they set the attention's dimensions themselves.
MODEL_CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "dtype": "bfloat16",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}


def changed_tests(source: Path, target: Path, changes: list[Change]) -> None:
    """Copy upstream's test files, with the changes in the one about sparse MLA."""
    model = target / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
    for name in FILES:
        text = (source / name).read_text()
        for change in changes if name == SPARSE_TESTS else []:
            found = text.count(change.old)
            assert found == change.count, f"{change.why}: upstream has {found} of {change.old!r}"
            text = text.replace(change.old, change.new.replace("{model}", str(model)))
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)


def run_tests(folder: Path, names: list[str]) -> list[Case]:
    """Run tests of the changed file by name."""
    run = run_pytest(
        ["-p", "upstream_fixtures", "--tb=short", "-k", SELECTION, *(f"{SPARSE_TESTS}::{name}" for name in names)],
        cwd=folder,
        report=folder / "report.xml",
        environment={"HF_HUB_OFFLINE": "1"},
        path=[HERE / "upstream"],
        workers=4,  # they spend their time in Python; more processes wait for each other on the GPU
    )
    assert run.returncode == 0, run.output[-20_000:]
    return run.cases


@pytest.fixture(scope="module")
def all_counts() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def counts(request, all_counts):
    """How often each test passed and was skipped, written to --results after each dtype."""
    yield all_counts
    if (results := request.config.getoption("--results", None)) and all_counts:
        changes = [change.why for change in CHANGES + FLOAT16_CHANGES]
        write_results(results / f"upstream-sparse-mla-{gpu_slug()}.json", all_counts, changes=changes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_upstream_tests_pass(tmp_path, counts, dtype):
    if missing := [name for name in FILES if not (TREE / name).exists()]:
        pytest.skip(f"needs upstream's tests: `make tree` ({TREE / missing[0]} is not there)")
    changes, names = CHANGES, OF_THE_BACKEND
    if dtype == "float16":
        changes = changes + FLOAT16_CHANGES
    else:
        names = names + OF_WHAT_IT_INHERITS
    changed_tests(TREE, tmp_path / "upstream", changes)
    cases = run_tests(tmp_path / "upstream", names)

    found = Counter((case.test, case.outcome, case.reason) for case in cases)
    for (test, outcome, reason), count in sorted(found.items()):
        counts.append({"test": test, "dtype": dtype, "outcome": outcome, "reason": reason, "count": count})
    passed = [case for case in cases if case.outcome == "passed"]
    assert {case.test for case in passed} == set(names)
    assert {case.reason for case in cases} - {""} <= SKIPS
    decoded = [case.parameters for case in passed if case.test == OF_THE_BACKEND[0]]
    for kv_format in ("-auto-", "-fp8-", "-fp8_ds_mla-"):
        assert any(kv_format in parameters for parameters in decoded), f"nothing passed with{kv_format}"
