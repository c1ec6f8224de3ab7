"""Float16 DSA models on compute capability 12.x get no MoE kernel that can only write bfloat16."""

from itertools import product

import pytest

SM120 = [(12, 0), (12, 1)]
OTHERS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0)]
DTYPES = ["float16", "bfloat16"]


def fp8_moe(capability, dtype, all2all_backend=None, moe_backend="auto"):
    arguments = {"dtype": dtype, "all2all_backend": all2all_backend, "moe_backend": moe_backend}
    return {"selector": "fp8_moe", "capability": capability, "arguments": arguments}


def nvfp4_moe(capability, dtype, flashinfer):
    arguments = {"dtype": dtype, "flashinfer": flashinfer}
    return {"selector": "nvfp4_moe", "capability": capability, "arguments": arguments}


def configurations(capability, dtype):
    """Every MoE configuration of a DSA checkpoint whose first choice on 12.x writes bfloat16 only."""
    return [
        fp8_moe(capability, dtype),
        fp8_moe(capability, dtype, "nixl_ep"),
        nvfp4_moe(capability, dtype, flashinfer=False),
    ]


def name(selection) -> str:
    major, minor = selection["capability"]
    return "-".join([selection["selector"], f"sm{major}{minor}", *map(str, selection["arguments"].values())])


@pytest.mark.parametrize(
    ("upstream", "ours", "selection"),
    [
        (upstream, ours, selection)
        for capability in SM120
        for (upstream, ours), selection in zip(
            [("DEEPGEMM", "TRITON"), ("BATCHED_DEEPGEMM", "BATCHED_TRITON"), ("VLLM_CUTLASS", "MARLIN")],
            configurations(capability, "float16"),
            strict=True,
        )
    ],
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_float16_passes_over_kernels_that_write_bfloat16_only(upstream, ours, selection, selected):
    assert selected.stock == upstream
    assert selected.patched == ours


@pytest.mark.parametrize(
    "selection",
    [
        *(row for capability, dtype in product(OTHERS, DTYPES) for row in configurations(capability, dtype)),
        *(row for capability in SM120 for row in configurations(capability, "bfloat16")),
        # FlashInfer's CUTLASS experts write float16, too.
        *(nvfp4_moe(capability, "float16", flashinfer=True) for capability in [*SM120, *OTHERS]),
    ],
    ids=name,
)
def test_everything_else_is_as_upstream_chooses(selection, selected):
    assert selected.patched == selected.stock


@pytest.mark.parametrize("selection", [fp8_moe((12, 0), "float16", moe_backend="deep_gemm")], ids=name)
def test_an_explicit_request_is_refused_with_the_reason(selection, selected):
    assert selected.stock == "DEEPGEMM"
    assert selected.patched == (
        "ValueError: FP8 MoE backend DEEPGEMM does not support the deployment configuration since "
        "kernel does not support float16 output on compute capability 12.x."
    )
