"""The installed package's fused DSA kernels in Triton's interpreter, on a fake GPU without fp8 instructions."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.kernels.fake_gpu_pool import fake_gpu_pool


@pytest.fixture(scope="module")
def interpreter_sm80(tmp_path_factory) -> Iterator[ProcessPoolExecutor]:
    with fake_gpu_pool((8, 0), tmp_path_factory.mktemp("triton-cache"), interpret=True) as pool:
        yield pool


def check_is_software() -> None:
    from tests.kernels.dsa_launches import kernels

    assert kernels.fp8_storage.__globals__["SOFTWARE_E4M3"]


def check(name: str, *args: str) -> None:
    from tests.kernels import dsa_reference

    getattr(dsa_reference, name)(*args, "cpu")


def test_platform_selects_software(interpreter_sm80):
    interpreter_sm80.submit(check_is_software).result()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_ds_mla"])
def test_caches(interpreter_sm80, kv_cache_dtype):
    interpreter_sm80.submit(check, "check_caches", kv_cache_dtype).result()


def test_queries(interpreter_sm80):
    interpreter_sm80.submit(check, "check_queries").result()


def test_packing(interpreter_sm80):
    interpreter_sm80.submit(check, "check_packing").result()
