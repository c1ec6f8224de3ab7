"""Every form of the sparse MLA kernels once, on a GPU, against the float64 reference: few and small launches.

Not collected by itself. test_memcheck.py and test_other_targets.py run it in processes of their own, which change
what surrounds the kernels; the many shapes are in test_sparse_mla_kernel.py.
"""

from dataclasses import replace

import pytest
import torch

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
