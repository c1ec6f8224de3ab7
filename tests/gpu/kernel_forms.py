"""Every form of the sparse MLA and MQA logits kernels, and of the fused kernels that feed them, once, on a GPU.

Few and small launches, against float64 references; what the fused kernels write is compared byte by byte.

Not collected by itself. test_memcheck.py and test_other_targets.py run it in processes of their own, which change
what surrounds the kernels; the many shapes are in test_sparse_mla_kernel.py.
"""

from dataclasses import replace

import pytest
import torch

from tests.kernels.mqa_reference import assert_logits, make_contiguous, make_paged
from tests.kernels.overlay import load_overlay
from tests.kernels.reference import assert_matches_reference, make_inputs

pytestmark = pytest.mark.gpu

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
TOLERANCE = {FLOAT16: 1e-3, BFLOAT16: 5e-3}
KV_FORMATS = ["16-bit", "fp8_e4m3", "fp8_ds_mla"]
PREFILL_COUNTS = [192 - 13 * (token % 4) for token in range(300)] + [0]
# The list of the first token is full: it names every row of the cache, the first and the last included.
FORMS = {
    "split": {"counts": [1024, 1023, 33, 1, 0], "num_heads": 8, "num_topk": 1024},
    "serial": {"counts": [130, 64, 0], "num_heads": 16, "num_topk": 130, "num_splits": 1},
    "odd-heads": {"counts": [200, 7], "num_heads": 11, "num_topk": 200},
    "64-heads": {"counts": [256] * 70, "num_heads": 64, "num_topk": 256},
    "128-heads": {"counts": [512, 500, 3], "num_heads": 128, "num_topk": 512},
    "prefill": {"counts": PREFILL_COUNTS, "num_heads": 8, "num_topk": 192, "is_prefill": True},
    "nope": {"counts": [300, 299, 5], "num_heads": 8, "num_topk": 300, "rope_dim": 0},
}
# Tokens of two requests, with no keys, one, and parts that are no multiples of anything.
KEY_BOUNDS = [*((0, end) for end in (0, 1, 63, 64, 65, 300)), *((300, end) for end in (300, 301, 555, 700))]


@pytest.fixture(autouse=True)
def launches_overlap_as_on_the_target(monkeypatch):
    """Upstream asks PyTorch, which sees the GPU that is there, whether a launch may overlap with the one before."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_arch_support_pdl", lambda: current_platform.has_device_capability(90))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, BFLOAT16) for form in FORMS), ("split", FLOAT16), ("prefill", FLOAT16)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_matches_reference(form, dtype, kv_format):
    kernels = load_overlay("vllm.v1.attention.ops.triton_mla_sparse")
    options = dict(FORMS[form])
    launch = {name: options.pop(name) for name in ("is_prefill", "num_splits") if name in options}
    inputs = make_inputs(**options, num_rows=options["num_topk"], dtype=dtype, kv_format=kv_format)
    # Drawn and compared on the CPU: the kernels' own launches are all that the GPU does.
    tensors = {name: value for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    on_gpu = replace(inputs, **{name: value.cuda() for name, value in tensors.items()})
    out, lse = kernels.sparse_mla_attention(*on_gpu, kv_scale=on_gpu.kv_scale, **launch)
    assert_matches_reference(out.cpu(), lse.cpu(), inputs, out_tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_contiguous_mqa_logits(num_heads):
    kernels = load_overlay("vllm.v1.attention.ops.triton_mqa_logits")
    inputs = make_contiguous(KEY_BOUNDS, 700, num_heads)
    arguments = [value.cuda() if isinstance(value, torch.Tensor) else value for value in inputs]
    assert_logits(kernels.mqa_logits(*arguments).cpu(), inputs.expected())


@pytest.mark.parametrize("next_n", [1, 2, 4])
@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_paged_mqa_logits(num_heads, next_n):
    kernels = load_overlay("vllm.v1.attention.ops.triton_mqa_logits")
    inputs = make_paged([1, 64, 700, 0, 65], num_heads, next_n=next_n)
    lengths = inputs.context_lens.cuda()
    schedule = kernels.paged_mqa_schedule(lengths, inputs.kv_cache.shape[1], 16)
    logits = kernels.paged_mqa_logits(
        inputs.q.cuda(),
        inputs.kv_cache.cuda(),
        inputs.weights.cuda(),
        lengths,
        inputs.block_tables.cuda(),
        schedule,
        inputs.max_model_len,
    )
    assert_logits(logits.cpu(), inputs.expected())


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_ds_mla"])
def test_fused_caches(kv_cache_dtype):
    from tests.kernels import dsa_reference

    dsa_reference.check_caches(kv_cache_dtype, "cuda")


def test_fused_queries():
    from tests.kernels import dsa_reference

    dsa_reference.check_queries("cuda")


def test_packed_queries():
    from tests.kernels import dsa_reference

    dsa_reference.check_packing("cuda")
