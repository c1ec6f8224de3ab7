"""Which attention backend a DSA model (GLM-5, DeepSeek-V3.2) gets, on every GPU generation since Ampere."""

from itertools import product

import pytest

OURS = "TRITON_MLA_SPARSE"
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]
DTYPES = ["float16", "bfloat16"]
KV_CACHE_DTYPES = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"]
TOPK = [2048, 1024, 1152]
PARALLEL = ["", "dcp", "pcp"]  # decode or prefill context parallelism over two ranks


def attention(capability, dtype, kv_cache_dtype, index_topk=2048, parallel="", flashinfer_api=True, backend=None):
    """`flashinfer_api`: whether FlashInfer has the sparse MLA decode API, which upstream needs on 12.x."""
    arguments = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "index_topk": index_topk,
        "flashinfer_api": flashinfer_api,
        "use_dcp": parallel == "dcp",
        "use_pcp": parallel == "pcp",
        "backend": backend,
    }
    return {"selector": "attention", "capability": capability, "arguments": arguments}


def kv_cache_format(kv_cache_dtype, backend):
    """What a KV cache dtype stands for once a backend is selected."""
    arguments = {"kv_cache_dtype": kv_cache_dtype, "backend": backend}
    return {"selector": "kv_cache_format", "capability": (12, 0), "arguments": arguments}


def name(selection) -> str:
    major, minor = selection["capability"]
    options = [f"{key}={value}" for key, value in selection["arguments"].items()]
    return "-".join([f"sm{major}{minor}", *options])


TABLE = [
    attention(*configuration)
    for configuration in product(CAPABILITIES, DTYPES, KV_CACHE_DTYPES, TOPK, PARALLEL, [True, False])
    if configuration[0][0] == 12 or configuration[-1]  # the API matters on 12.x only
]


def refused(answer: str) -> bool:
    return answer.startswith("ValueError: No valid attention backend found for cuda with ")


def expected_reasons(selection) -> list[str]:
    """Every reason for which ours refuses a configuration, in the order in which vLLM asks."""
    arguments = selection["arguments"]
    dtype, kv_cache_dtype, topk = arguments["dtype"], arguments["kv_cache_dtype"], arguments["index_topk"]
    reasons = []
    if kv_cache_dtype == "fp8_e5m2":
        reasons.append("kv_cache_dtype not supported")
    if arguments["use_pcp"]:
        reasons.append("PCP not supported")
    if kv_cache_dtype == "fp8_e5m2":
        reasons.append(
            "TRITON_MLA_SPARSE requires a KV cache in the model's dtype, fp8_e4m3 or fp8_ds_mla, "
            "got kv_cache_dtype=fp8_e5m2"
        )
    elif kv_cache_dtype in DTYPES and kv_cache_dtype != dtype:
        reasons.append(
            "TRITON_MLA_SPARSE requires a 16-bit KV cache in the model's dtype, got "
            f"kv_cache_dtype={kv_cache_dtype} and dtype={dtype}"
        )
    elif arguments["use_dcp"] and topk == 1152:
        reasons.append(
            "TRITON_MLA_SPARSE requires index_topk 512, 1024 or 2048 with DCP, which the indexer can merge "
            "across ranks, got 1152"
        )
    return reasons


@pytest.mark.parametrize("selection", TABLE, ids=name)
def test_upstream_keeps_what_it_serves_and_ours_comes_last(selection, selected):
    for answer in (selected.stock, selected.patched):
        assert "Error: " not in answer.removeprefix("ValueError: "), "refused because the GPU is fake"
    reasons = expected_reasons(selection)
    if not refused(selected.stock):
        assert selected.patched == selected.stock
    elif reasons:
        assert selected.patched == selected.stock.removesuffix("}.") + f", {OURS}: [{', '.join(reasons)}]}}."
    else:
        assert selected.patched == OURS


@pytest.mark.parametrize("selection", [attention((12, 0), "float16", "auto")], ids=name)
def test_the_error_that_the_distribution_removes(selection, selected):
    assert selected.stock.endswith(
        "Reasons: {TRITON_MLA: [sparse not supported], "
        "FLASHINFER_MLA_SPARSE_SM120: [dtype not supported, dtype not supported]}."
    )


SM120 = [(12, 0), (12, 1)]
AMPERE_AND_ADA = [(8, 0), (8, 6), (8, 9)]
SERVED = ["auto", "fp8", "fp8_e4m3", "fp8_ds_mla"]
# The main rows of the table in words, so that a change of upstream's own choice shows here.
EXPECTED = {
    OURS: [
        *(attention(*row) for row in product(SM120, ["float16"], SERVED, TOPK)),
        *(attention(*row) for row in product(SM120, ["bfloat16"], SERVED, [1024, 1152])),
        *(attention(*row) for row in product(SM120, ["bfloat16"], ["bfloat16"])),
        *(attention(*row, flashinfer_api=False) for row in product(SM120, ["bfloat16"], SERVED)),
        *(attention(*row, parallel="dcp") for row in product(SM120, DTYPES, SERVED, [2048, 1024])),
        *(attention(*row) for row in product(AMPERE_AND_ADA, DTYPES, SERVED, TOPK)),
        *(attention(*row, parallel="dcp") for row in product(AMPERE_AND_ADA, DTYPES, SERVED, [2048, 1024])),
        # Native backends of SM90 and SM100 that have no fp8 for float16, or no DCP.
        *(attention((9, 0), "float16", each) for each in ["fp8", "fp8_e4m3", "fp8_ds_mla"]),
        attention((9, 0), "float16", "auto", parallel="dcp"),
        attention((10, 0), "float16", "fp8_ds_mla"),
    ],
    "FLASHINFER_MLA_SPARSE_SM120": [attention(*row) for row in product(SM120, ["bfloat16"], SERVED)],
    "FLASH_ATTN_MLA_SPARSE": [attention((9, 0), dtype, "auto") for dtype in DTYPES],
    "FLASHINFER_MLA_SPARSE": [
        attention((10, 0), "float16", "auto"),
        attention((10, 0), "float16", "fp8"),
        attention((10, 0), "bfloat16", "fp8_e4m3", parallel="dcp"),
    ],
    "FLASHMLA_SPARSE": [
        attention((9, 0), "bfloat16", "auto", parallel="dcp"),  # its constructor refuses this: docs/install.md
        attention((9, 0), "bfloat16", "fp8"),
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
    "selection",
    [attention(*row, backend=OURS) for row in product(CAPABILITIES, DTYPES, KV_CACHE_DTYPES, TOPK, PARALLEL)],
    ids=name,
)
def test_ours_can_be_asked_for_everywhere(selection, selected):
    reasons = expected_reasons(selection)
    assert selected.patched == (
        "ValueError: Selected backend AttentionBackendEnum.TRITON_MLA_SPARSE is not valid for this "
        f"configuration. Reason: {reasons}"
        if reasons
        else OURS
    )
    assert selected.stock.startswith(f"ValueError: Unknown attention backend: '{OURS}'")


@pytest.mark.parametrize("selection", [attention((7, 5), "float16", "auto", backend=OURS)], ids=name)
def test_ours_needs_ampere(selection, selected):
    assert selected.patched == (
        "ValueError: Selected backend AttentionBackendEnum.TRITON_MLA_SPARSE is not valid for this "
        "configuration. Reason: ['compute capability not supported']"
    )


@pytest.mark.parametrize("selection", [kv_cache_format(each, OURS) for each in SERVED], ids=name)
def test_ours_takes_a_kv_cache_dtype_at_its_word(selection, selected):
    """On SM120 upstream's own backend makes fp8_ds_mla of auto and fp8; the cache of ours is what its name says."""
    assert selected.patched == selection["arguments"]["kv_cache_dtype"]


@pytest.mark.parametrize(
    "selection", [kv_cache_format(each, "FLASHINFER_MLA_SPARSE_SM120") for each in SERVED], ids=name
)
def test_upstreams_conversion_is_unchanged(selection, selected):
    assert selected.patched == selected.stock == "fp8_ds_mla"
