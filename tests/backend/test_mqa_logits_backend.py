"""DeepGEMM or Triton for the sparse indexer's logits: who is chosen, why, and what follows from it.

The `check_` functions run in a process with a fake GPU and Triton's interpreter.
"""

import re
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from vllm import envs
from vllm.platforms.interface import DeviceCapability
from vllm.utils import deep_gemm
from vllm.v1.attention.ops import mqa_logits_backend

NO_NVCC = "no nvcc was found"
COMPILES = "it can compile its kernels here"
CANNOT_COMPILE = f"DeepGEMM cannot compile its kernels: {NO_NVCC}"
NOT_INSTALLED = "DeepGEMM is not installed"
ONLY_DEEP_GEMM = "only it reads the MX scales of the indexer's cache"


def no_kernels(version: str) -> str:
    return f"DeepGEMM has no kernels for compute capability {version}"


def forced(path: str) -> str:
    return f"forced by VLLM_SPARSE_INDEXER_LOGITS={path}"


def decide(capability, *, installed=True, problem=None, variable=None) -> tuple[str, str]:
    """Return the path that a host gets, and the reason in its log."""
    from vllm.platforms import current_platform

    lines = []
    mqa_logits_backend.use_triton_mqa_logits.cache_clear()
    with (
        patch.object(
            type(current_platform), "get_device_capability", lambda device_id=0: DeviceCapability(*capability)
        ),
        patch.object(mqa_logits_backend, "has_deep_gemm", lambda: installed),
        patch.object(mqa_logits_backend, "get_nvcc_problem", lambda: problem),
        patch.object(mqa_logits_backend.logger, "info_once", lambda text, *values: lines.append(text % values)),
        patch.dict("os.environ", {} if variable is None else {"VLLM_SPARSE_INDEXER_LOGITS": variable}),
    ):
        answers = {mqa_logits_backend.use_triton_mqa_logits() for _ in range(3)}
    mqa_logits_backend.use_triton_mqa_logits.cache_clear()
    assert len(answers) == len(lines) == 1, "decided and logged once"
    form = r"Sparse indexer logits: (.*) \((.*)\); set VLLM_SPARSE_INDEXER_LOGITS to force a path\."
    path, reason = re.fullmatch(form, lines[0]).groups()
    assert answers == {{"Triton kernels": True, "DeepGEMM": False}[path]}
    return path, reason


@pytest.fixture
def choose(interpreter):
    """`decide`, where there is a fake GPU."""
    return lambda *arguments, **options: interpreter.submit(decide, *arguments, **options).result()


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (11, 0)])
@pytest.mark.parametrize("host", [{}, {"installed": False}, {"problem": NO_NVCC}])
def test_triton_where_deep_gemm_has_no_kernels(capability, host, choose):
    # The first reason, whatever else is missing.
    assert choose(capability, **host) == ("Triton kernels", no_kernels("{}.{}".format(*capability)))


@pytest.mark.parametrize("capability", [(9, 0), (12, 0), (12, 1)])
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ({}, ("DeepGEMM", COMPILES)),
        ({"installed": False}, ("Triton kernels", NOT_INSTALLED)),
        ({"installed": False, "problem": NO_NVCC}, ("Triton kernels", NOT_INSTALLED)),
        ({"problem": NO_NVCC}, ("Triton kernels", CANNOT_COMPILE)),
    ],
)
def test_deep_gemm_where_it_can_serve(capability, host, expected, choose):
    assert choose(capability, **host) == expected


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ({}, ONLY_DEEP_GEMM),
        ({"problem": NO_NVCC}, f"{ONLY_DEEP_GEMM}, but {CANNOT_COMPILE}"),
        ({"installed": False}, f"{ONLY_DEEP_GEMM}, but {NOT_INSTALLED}"),
        ({"variable": "deep_gemm"}, forced("deep_gemm")),
    ],
)
def test_sm100_stays_with_deep_gemm(capability, host, expected, choose):
    assert choose(capability, **host) == ("DeepGEMM", expected)


def test_sm100_refuses_triton(choose):
    with pytest.raises(ValueError, match=r"=triton is not possible on compute capability 10\.3: .* only DeepGEMM"):
        choose((10, 3), variable="triton")


@pytest.mark.parametrize("capability", [(8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("host", [{}, {"installed": False}, {"problem": NO_NVCC}])
def test_triton_by_force(capability, host, choose):
    assert choose(capability, variable="triton", **host) == ("Triton kernels", forced("triton"))


@pytest.mark.parametrize(
    ("capability", "host", "reason"),
    [
        ((9, 0), {}, forced("deep_gemm")),
        ((12, 0), {"problem": NO_NVCC}, f"{forced('deep_gemm')}, but {CANNOT_COMPILE}"),
        ((9, 0), {"installed": False}, f"{forced('deep_gemm')}, but {NOT_INSTALLED}"),
        ((8, 6), {}, f"{forced('deep_gemm')}, but {no_kernels('8.6')}"),
    ],
)
def test_deep_gemm_by_force_is_told_what_is_against_it(capability, host, reason, choose):
    assert choose(capability, variable="deep_gemm", **host) == ("DeepGEMM", reason)


def test_auto_is_the_default(choose):
    for host in ({}, {"problem": NO_NVCC}):
        assert choose((9, 0), variable="auto", **host) == choose((9, 0), **host)


def test_another_value_is_an_error_that_lists_the_right_ones(choose):
    with pytest.raises(ValueError, match=r"Invalid value 'cutlass' .* \['auto', 'deep_gemm', 'triton'\]"):
        choose((9, 0), variable="cutlass")


def test_other_platforms_are_not_asked(monkeypatch):
    # Nor is the variable of any meaning there.
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_LOGITS", "triton")
    monkeypatch.setattr(mqa_logits_backend, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    mqa_logits_backend.use_triton_mqa_logits.cache_clear()
    assert not mqa_logits_backend.use_triton_mqa_logits()
    mqa_logits_backend.use_triton_mqa_logits.cache_clear()


def test_the_compile_cache_knows_the_variable(monkeypatch):
    factors = []
    for path in ("triton", "deep_gemm"):
        monkeypatch.setenv("VLLM_SPARSE_INDEXER_LOGITS", path)
        factors.append(envs.compile_factors()["VLLM_SPARSE_INDEXER_LOGITS"])
    assert factors == ["triton", "deep_gemm"]


# What the wrappers of utils/deep_gemm.py hand over.

Q = torch.zeros(2, 3, 16, 32).to(torch.float8_e4m3fn)
ARGUMENTS = {name: object() for name in ("k", "k_scale", "weights", "starts", "ends", "cache", "lengths", "blocks")}
SCHEDULE = object()
SM90 = SimpleNamespace(is_device_capability_family=lambda family: family == 90)


@contextmanager
def kernels(use_triton: bool):
    """Stand in for both kinds of kernels; yields those of Triton and of DeepGEMM."""
    triton = Mock()
    own = {
        "_fp8_fp4_mqa_logits_impl": "mqa_logits",
        "_fp8_fp4_paged_mqa_logits_impl": "paged_mqa_logits",
        "_get_paged_mqa_logits_metadata_impl": "paged_mqa_schedule",
    }
    native = Mock()
    with (
        patch.dict("sys.modules", {"vllm.v1.attention.ops.triton_mqa_logits": triton}),
        patch.multiple(deep_gemm, **{name: getattr(native, function) for name, function in own.items()}),
        patch.object(deep_gemm, "use_triton_mqa_logits", lambda: use_triton),
        patch.object(deep_gemm, "_lazy_init", Mock(side_effect=AssertionError if use_triton else None)),
    ):
        yield triton, native


def call_prefill(q):
    a = ARGUMENTS
    return deep_gemm.fp8_fp4_mqa_logits(q, (a["k"], a["k_scale"]), a["weights"], a["starts"], a["ends"], 77)


def call_decode(q, block_tables, indices=None):
    a = ARGUMENTS
    return deep_gemm.fp8_fp4_paged_mqa_logits(
        q, a["cache"], a["weights"], a["lengths"], block_tables, SCHEDULE, max_model_len=99, indices=indices
    )


def test_prefill_calls_triton():
    with kernels(use_triton=True) as (triton, native):
        result = call_prefill((Q[0], None))
    assert result is triton.mqa_logits.return_value
    (q, *rest), options = triton.mqa_logits.call_args
    assert q.data_ptr() == Q.data_ptr()
    assert rest == [*(ARGUMENTS[name] for name in ("k", "k_scale", "weights", "starts", "ends")), 77]
    assert not options
    assert not native.mock_calls


@pytest.mark.parametrize("indices", [None, object()])
def test_decode_calls_triton(indices):
    with kernels(use_triton=True) as (triton, native):
        result = call_decode((Q, None), ARGUMENTS["blocks"], indices)
    assert result is triton.paged_mqa_logits.return_value
    arguments, options = triton.paged_mqa_logits.call_args
    assert arguments == (Q, *(ARGUMENTS[name] for name in ("cache", "weights", "lengths", "blocks")), SCHEDULE, 99)
    assert options == {"indices": indices}
    assert not native.mock_calls


@pytest.mark.parametrize("next_n", [1, 4])
def test_the_schedule_has_a_slot_a_multiprocessor(next_n, monkeypatch):
    # DeepGEMM halves them on SM90 with four tokens a request; Triton's kernel has no such clusters.
    monkeypatch.setattr(deep_gemm, "current_platform", SM90)
    lengths = torch.zeros(5, next_n, dtype=torch.int32)
    with kernels(use_triton=True) as (triton, native):
        result = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 132)
    assert result is triton.paged_mqa_schedule.return_value
    assert triton.paged_mqa_schedule.call_args.args == (lengths, 64, 132, None)
    assert not native.mock_calls


def test_without_triton_deep_gemm_is_called_as_ever(monkeypatch):
    monkeypatch.setattr(deep_gemm, "current_platform", SM90)
    lengths = torch.zeros(5, 4, dtype=torch.int32)
    with kernels(use_triton=False) as (triton, native):
        assert call_prefill((Q[0], None)) is native.mqa_logits.return_value
        assert call_decode((Q, None), torch.zeros(2, 3)) is native.paged_mqa_logits.return_value
        metadata = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 132)
    assert metadata is native.paged_mqa_schedule.return_value
    assert native.paged_mqa_schedule.call_args.args == (lengths, 64, 66)
    assert not triton.mock_calls


@pytest.mark.parametrize(
    ("q", "message"),
    [
        ((Q, torch.zeros(2, 3, 16, dtype=torch.int32)), r"torch\.float8_e4m3fn with MX scales"),
        ((Q.view(torch.int8), torch.zeros(2, 3, 16, dtype=torch.int32)), r"torch\.int8 with MX scales"),
        ((Q.view(torch.int8), None), r"torch\.int8 without MX scales"),
    ],
)
def test_triton_refuses_queries_with_mx_scales(q, message):
    with kernels(use_triton=True) as (triton, _):
        for call in (call_prefill, lambda q: call_decode(q, ARGUMENTS["blocks"])):
            with pytest.raises(ValueError, match=message):
                call(q)
    assert not triton.mock_calls


# What the indexer does with the answer, on a fake GPU.


@contextmanager
def host(capability=(8, 6), *, variable="auto", installed=True, num_speculative_tokens=0, index_heads=64):
    """A worker that builds its model on this host; yields its configuration."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.platforms import current_platform
    from vllm.utils.deep_gemm_nvcc import get_nvcc_problem
    from vllm.v1.attention.backends.mla import indexer

    config = VllmConfig()
    hf_config = SimpleNamespace(index_n_heads=index_heads)
    with (
        patch.dict("os.environ", VLLM_SPARSE_INDEXER_LOGITS=variable, CUDA_HOME="/nowhere"),
        patch.object(
            type(current_platform), "get_device_capability", lambda device_id=0: DeviceCapability(*capability)
        ),
        patch.object(mqa_logits_backend, "has_deep_gemm", lambda: installed),
        patch.object(sparse_attn_indexer, "has_deep_gemm", lambda: installed),
        patch.object(indexer, "has_deep_gemm", lambda: installed),
        patch.object(type(config), "num_speculative_tokens", num_speculative_tokens),
        set_current_vllm_config(config),
        patch.object(config, "model_config", SimpleNamespace(hf_text_config=hf_config)),
    ):
        mqa_logits_backend.use_triton_mqa_logits.cache_clear()
        get_nvcc_problem.cache_clear()
        yield config
    mqa_logits_backend.use_triton_mqa_logits.cache_clear()
    get_nvcc_problem.cache_clear()


def make_indexer(glm5next=False):
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.models.glm5next.nvidia.sparse_indexer import SparseAttnIndexerKpool

    shared = {
        "k_cache": None,
        "quant_block_size": 128,
        "scale_fmt": "ue8m0",
        "topk_tokens": 2048,
        "head_dim": 128,
        "max_total_seq_len": 8192,
        "topk_indices_buffer": torch.empty(8, 2176 if glm5next else 2048, dtype=torch.int32),
    }
    if glm5next:
        return SparseAttnIndexerKpool(max_pool_len=4096, **shared)
    return SparseAttnIndexer(max_model_len=4096, **shared)


def check_gate(glm5next):
    from vllm.models.glm5next.nvidia import sparse_indexer

    with patch.object(sparse_indexer, "has_deep_gemm", lambda: False):
        # Without the package Triton serves ...
        for capability in ((8, 0), (9, 0), (12, 0)):
            with host(capability, installed=False):
                make_indexer(glm5next)
        # ... unless it may not or cannot.
        for capability, variable in (((9, 0), "deep_gemm"), ((10, 0), "auto")):
            with (
                host(capability, variable=variable, installed=False),
                pytest.raises(RuntimeError, match="requires DeepGEMM"),
            ):
                make_indexer(glm5next)
    with host((10, 0), variable="triton"), pytest.raises(ValueError, match="MX scales"):
        make_indexer(glm5next)


@pytest.mark.parametrize("glm5next", [False, True])
def test_the_model_starts_where_either_can_serve(glm5next, interpreter):
    interpreter.submit(check_gate, glm5next).result()


def warmed_up(glm5next=False, **options) -> list[dict]:
    from vllm.v1.attention.ops import triton_mqa_logits

    with host(**options), patch.object(triton_mqa_logits, "register_warmup") as register:
        make_indexer(glm5next)
    return [{**call.kwargs, "next_n": list(call.kwargs["next_n"])} for call in register.call_args_list]


def check_warmup():
    def kernel(num_heads, next_n):
        return [{"num_heads": num_heads, "head_dim": 128, "next_n": next_n}]

    assert warmed_up() == kernel(64, [1])
    assert warmed_up(num_speculative_tokens=3) == kernel(64, [1, 2, 3, 4])
    # More are flattened to one row each.
    assert warmed_up(num_speculative_tokens=4) == kernel(64, [1])
    assert warmed_up(index_heads=16) == kernel(16, [1])
    # GLM-5.3 pads its heads.
    assert warmed_up(glm5next=True, index_heads=16) == kernel(32, [1])
    assert warmed_up(capability=(9, 0), variable="deep_gemm") == []


def test_what_can_run_is_compiled_at_start(interpreter):
    interpreter.submit(check_warmup).result()


def native(capability, **options) -> list[int]:
    from vllm.v1.attention.backends.mla.indexer import _supports_native_decode

    with host(capability, **options):
        return [next_n for next_n in range(1, 7) if _supports_native_decode(next_n)]


def check_native_decode():
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):
        assert native(capability, variable="triton") == [1, 2, 3, 4]
        assert native(capability, variable="triton", installed=False) == [1, 2, 3, 4]
    # DeepGEMM's rules are upstream's.
    assert native((9, 0), variable="deep_gemm") == [1, 2, 4]
    assert native((12, 0), variable="deep_gemm") == [1, 2]
    assert native((10, 0)) == [1, 2, 3, 4, 5, 6]


def test_triton_takes_up_to_four_tokens_a_request(interpreter):
    interpreter.submit(check_native_decode).result()


def check_adaptive_verification():
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    def supported(capability, **options):
        with host(capability, **options):
            return DeepseekV32IndexerBackend.supports_device_cpu_query_lens_mismatch()

    # On SM90 every query becomes a row of its own, which both kernels can do; elsewhere as upstream has it.
    assert supported((9, 0), variable="triton", installed=False)
    assert supported((9, 0), variable="deep_gemm")
    assert not supported((12, 0), variable="triton")
    assert not supported((8, 6))


def test_adaptive_verification_is_where_upstream_has_it(interpreter):
    interpreter.submit(check_adaptive_verification).result()


def check_draft_update(variable):
    """The schedule of the next draft token is computed into the buffer that CUDA graphs read."""
    from vllm.v1.attention.backends.mla.indexer import (
        DeepSeekV32IndexerDecodeMetadata,
        DeepseekV32IndexerMetadata,
        DeepseekV32IndexerMetadataBuilder,
    )

    num_slots, lengths = 6, torch.tensor([17, 330, 65], dtype=torch.int32)
    builder = object.__new__(DeepseekV32IndexerMetadataBuilder)
    vars(builder).update(dcp_world_size=1, compress_ratio=1, num_sms=num_slots)
    builder.kv_cache_spec = SimpleNamespace(num_states=64)
    block_table = torch.arange(24, dtype=torch.int32).view(3, 8)
    schedule = torch.full((num_slots + 1, 2), -7, dtype=torch.int32)
    decode = DeepSeekV32IndexerDecodeMetadata(
        block_table=torch.zeros_like(block_table),
        seq_lens=torch.zeros(3, 1, dtype=torch.int32),
        decode_lens=torch.zeros(3, dtype=torch.int32),
        requires_padding=False,
        schedule_metadata=schedule,
    )
    metadata = DeepseekV32IndexerMetadata(
        seq_lens=lengths,
        max_seq_len=330,
        slot_mapping=torch.zeros(3, dtype=torch.int64),
        num_decodes=3,
        num_decode_tokens=3,
        num_prefills=0,
        num_prefill_tokens=0,
        decode=decode,
        block_table=block_table,
    )
    with host((8, 6), variable=variable, installed=False):
        builder.update_draft_decode_metadata(metadata)
    return schedule


def check_draft_schedules():
    from vllm.v1.attention.ops.triton_mqa_logits import paged_mqa_schedule

    expected = paged_mqa_schedule(torch.tensor([[17], [330], [65]], dtype=torch.int32), 64, 6)
    assert expected.shape == (7, 2)
    assert check_draft_update("triton").equal(expected)
    # Nobody computes one where nobody serves.
    assert (check_draft_update("deep_gemm") == -7).all()


def test_metadata_is_computed_without_the_package(interpreter):
    interpreter.submit(check_draft_schedules).result()
