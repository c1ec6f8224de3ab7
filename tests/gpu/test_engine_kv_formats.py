"""fp8 KV caches in the real engine, against transformers in float32.

An fp8 cache costs accuracy, whatever reads it. How much is computed: the
reference with its KV values rounded as the cache rounds them (C). An engine may
err by C and by what the native backend errs with a 16-bit cache (N), no more:

    |engine - reference| <= |engine - rounded reference| + |rounded reference - reference| = N + C

Where a native backend reads the same format, it must not be more accurate.
"""

import pytest

from tests.gpu.engine import Run
from tests.gpu.prompts import both, rounding_errors
from tests.gpu.yardstick import LENGTHS as YARDSTICK_LENGTHS
from tests.gpu.yardstick import NATIVE, check, errors, native_errors, row

pytestmark = pytest.mark.gpu

LENGTHS = [[900, 2048], [2500, 3000, 8000]]
ROW_BYTES = {"fp8": 576, "fp8_ds_mla": 656}


def kv_run(name: str, dtype: str, kv: str, backend: str = "TRITON_MLA_SPARSE", **fields) -> Run:
    options = {"max_model_len": 8192, "enable_trace_replay": True}
    return Run(name, dtype, backend, [both(lengths) for lengths in LENGTHS], options, kv=kv, **fields)


RUNS = [kv_run(f"{dtype}, {kv}", dtype, kv) for dtype in ("float16", "bfloat16") for kv in ROW_BYTES]
BFLOAT16_DS_MLA = next(run for run in RUNS if (run.dtype, run.kv) == ("bfloat16", "fp8_ds_mla"))
NATIVE_DS_MLA = kv_run("bfloat16, fp8_ds_mla, native", "bfloat16", "fp8_ds_mla", "FLASHMLA_SPARSE", needs_capability=9)


@pytest.mark.parametrize(("run", "native"), [(run, NATIVE[run.dtype]) for run in RUNS], ids=str)
def test_costs_what_its_rounding_costs(engines, reference, rows, run, native):
    worker = engines.result(run)["workers"][0]
    assert worker["backends"] == ["TRITON_MLA_SPARSE"]
    assert worker["kv_row_bytes"] == [ROW_BYTES[run.kv]]

    found = errors(engines, run, LENGTHS, reference)
    yardstick = native_errors(engines, native, YARDSTICK_LENGTHS, reference)
    new_rows = [row(engines, run, length, found[length], None, None) for length in found]
    if run is not BFLOAT16_DS_MLA:  # its rows come with the native ones
        rows += new_rows
    limits = {length: yardstick[length] + rounding_errors(length, run.kv, reference) for length in found}
    check(found, limits, "\n".join(map(str, new_rows)))


@pytest.mark.parametrize(("run", "native"), [(BFLOAT16_DS_MLA, NATIVE_DS_MLA)], ids=str)
def test_fp8_ds_mla_is_as_accurate_as_the_native_backends(engines, reference, rows, run, native):
    found = errors(engines, run, LENGTHS, reference)
    yardstick = native_errors(engines, native, LENGTHS, reference)
    new_rows = [row(engines, run, length, found[length], native, yardstick[length]) for length in found]
    rows += new_rows
    check(found, yardstick, "\n".join(map(str, new_rows)))
