"""Which attention backend a DSA model (GLM-5, DeepSeek-V3.2) gets, on every GPU generation since Ampere."""

from itertools import product

import pytest

OURS = "TRITON_MLA_SPARSE"
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]


def attention(capability, dtype, kv_cache_dtype, index_topk=2048, flashinfer_api=True, backend=None):
    """`flashinfer_api`: whether FlashInfer has the sparse MLA decode API, which upstream needs on 12.x."""
    arguments = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "index_topk": index_topk,
        "flashinfer_api": flashinfer_api,
        "backend": backend,
    }
    return {"selector": "attention", "capability": capability, "arguments": arguments}


def name(selection) -> str:
    major, minor = selection["capability"]
    return "-".join([f"sm{major}{minor}", *map(str, selection["arguments"].values())])


TABLE = [
    attention(*configuration)
    for configuration in product(
        CAPABILITIES, ["float16", "bfloat16"], ["auto", "fp8_ds_mla"], [2048, 1024], [True, False]
    )
    if configuration[0][0] == 12 or configuration[-1]  # the API matters on 12.x only
]


def refused(answer: str) -> bool:
    return answer.startswith("ValueError: No valid attention backend found for cuda with ")


@pytest.mark.parametrize("selection", TABLE, ids=name)
def test_upstream_keeps_what_it_serves_and_ours_comes_last(selection, selected):
    if not refused(selected.stock):
        assert selected.patched == selected.stock
    elif refused(selected.patched):
        head, ours, reason = selected.patched.partition(f", {OURS}: [")
        assert ours, "our backend gives no reason"
        assert reason == "kv_cache_dtype not supported]}."
        assert head + "}." == selected.stock, "upstream's own reasons changed"
    else:
        assert selected.patched == OURS


@pytest.mark.parametrize("selection", TABLE, ids=name)
def test_no_backend_refuses_because_the_gpu_is_fake(selection, selected):
    assert "Error: " not in selected.stock.removeprefix("ValueError: ")
    assert "Error: " not in selected.patched.removeprefix("ValueError: ")


@pytest.mark.parametrize(
    "selection",
    [row for row in TABLE if row["capability"][0] in (9, 10)],
    ids=name,
)
def test_hopper_and_datacenter_blackwell_never_get_ours(selection, selected):
    assert selected.patched != OURS
    assert refused(selected.patched) == refused(selected.stock)


@pytest.mark.parametrize("selection", [attention((12, 0), "float16", "auto")], ids=name)
def test_the_error_that_the_distribution_removes(selection, selected):
    assert selected.stock.endswith(
        "Reasons: {TRITON_MLA: [sparse not supported], "
        "FLASHINFER_MLA_SPARSE_SM120: [dtype not supported, dtype not supported]}."
    )


SM120 = [(12, 0), (12, 1)]
AMPERE_AND_ADA = [(8, 0), (8, 6), (8, 9)]
EXPECTED = {
    OURS: [
        *(attention(*row) for row in product(SM120, ["float16"], ["auto"], [2048, 1024], [True, False])),
        *(attention(*row, flashinfer_api=False) for row in product(SM120, ["bfloat16"], ["auto"])),
        *(attention(*row) for row in product(SM120, ["bfloat16"], ["auto"], [1024])),
        *(attention(*row) for row in product(AMPERE_AND_ADA, ["float16", "bfloat16"], ["auto"], [2048, 1024])),
    ],
    "FLASHINFER_MLA_SPARSE_SM120": [attention(*row) for row in product(SM120, ["bfloat16"], ["auto", "fp8_ds_mla"])],
    "FLASH_ATTN_MLA_SPARSE": [attention((9, 0), dtype, "auto") for dtype in ["float16", "bfloat16"]],
    "FLASHINFER_MLA_SPARSE": [attention((10, 0), "float16", "auto")],
    "FLASHMLA_SPARSE": [
        attention((9, 0), "bfloat16", "fp8_ds_mla"),
        attention((10, 0), "bfloat16", "auto"),
        attention((10, 0), "bfloat16", "fp8_ds_mla"),
    ],
}


@pytest.mark.parametrize(
    ("expected", "selection"),
    [(backend, row) for backend, rows in EXPECTED.items() for row in rows],
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_selected_backend(expected, selection, selected):
    assert selected.patched == expected


@pytest.mark.parametrize(
    "selection", [attention(each, "float16", "auto", backend=OURS) for each in CAPABILITIES], ids=name
)
def test_ours_can_be_asked_for_everywhere(selection, selected):
    assert selected.patched == OURS
    assert selected.stock.startswith(f"ValueError: Unknown attention backend: '{OURS}'")


@pytest.mark.parametrize("selection", [attention((7, 5), "float16", "auto", backend=OURS)], ids=name)
def test_ours_says_why_it_refuses(selection, selected):
    assert selected.patched == (
        "ValueError: Selected backend AttentionBackendEnum.TRITON_MLA_SPARSE is not valid for this "
        "configuration. Reason: ['compute capability not supported']"
    )
