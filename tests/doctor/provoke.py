"""Provoke failures that need no GPU, and log them as a server does: only for a child, as it changes vLLM for good.

    python -m tests.doctor.provoke NAME    # prints the log

Each function makes vLLM, Triton, DeepGEMM or the GGUF plugin fail as it would on the user's machine; none of them has a
message of its own. `FAILURES` names them as the table of known failures does.
"""

import io
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from . import ask

HERE = Path(__file__).resolve()
GLM5 = str(HERE.with_name("configs") / "glm5")
LAYER = {"head_size": 576, "use_mla": True, "use_sparse": True, "num_heads": 64}


def server_log(function: Callable[[], None]) -> str:
    """Return what a server would log: by vLLM's own logger, with the traceback if the function fails."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_PLUGINS": ""}
    from vllm import logger

    logging.disable(logging.NOTSET)
    with redirect_stdout(io.StringIO()) as log:
        logger._configure_vllm_root_logger()
        logger.set_vllm_process_name("EngineCore")
        try:
            function()
        except Exception:
            logger.init_logger("vllm.v1.engine.core").exception("EngineCore failed to start.")
    return log.getvalue()


def pretend(*options: str) -> Any:
    """Return vLLM's configuration of GLM-5 on the GPU that the options name."""
    from vllm.sm120.doctor import arguments, gpus, host, model

    ask.clear_caches()
    parsed = arguments.parse([GLM5, *options])
    host.pretend(gpus.find(parsed))
    logging.disable(logging.NOTSET)  # the doctor is quiet, a server is not
    config, _ = model.configure(model.locate(parsed), parsed)
    return config


def select_backend(*options: str) -> None:
    config = pretend(*options)
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    with set_current_vllm_config(config):
        get_attn_backend(dtype=config.model_config.dtype, kv_cache_dtype=config.cache_config.cache_dtype, **LAYER)


def success() -> None:
    select_backend("--capability", "12.0", "--dtype", "float16")


def no_backend() -> None:
    select_backend("--capability", "7.5", "--dtype", "float16")


def backend_refuses() -> None:
    select_backend("--capability", "12.0", "--dtype", "float16", "--attention-backend", "FLASHMLA_SPARSE")


def flashinfer_too_old() -> None:
    pretend("--capability", "12.0")
    import vllm.utils.flashinfer

    with patch.object(vllm.utils.flashinfer, "has_flashinfer_sparse_mla_sm120", lambda: False):
        select_backend("--capability", "12.0", "--attention-backend", "FLASHINFER_MLA_SPARSE_SM120")


def flashinfer_missing() -> None:
    pretend("--capability", "12.0")
    from vllm.utils import flashinfer

    flashinfer.has_flashinfer.cache_clear()
    with patch.dict(sys.modules, {"flashinfer": None}), patch("importlib.util.find_spec", lambda *_: None):
        flashinfer.flashinfer_trtllm_fp8_block_scale_moe()


def _compile(kernel: Any, capability: int, signature: dict[str, str], constants: dict[str, int]) -> Any:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    return compile(source, target=GPUTarget("cuda", capability, 32))


def fp8e4nv() -> None:
    """A kernel of upstream's that converts to e4m3, for an RTX 3090."""
    pretend("--capability", "8.6")
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import reshape_and_cache_kernel_flash as kernel

    types = dict.fromkeys(kernel.arg_names, "i64") | {name: "*fp16" for name in kernel.arg_names if "ptr" in name}
    types |= dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), "*fp8e4nv")
    types |= {"slot_mapping_ptr": "*i64", "k_scale": "*fp32", "v_scale": "*fp32"}
    constants = {p.name: 64 for p in kernel.params if p.is_constexpr}
    _compile(kernel, 86, {name: types[name] for name in kernel.arg_names if name not in constants}, constants)


def shared_memory() -> None:
    """A kernel with more shared memory than an RTX PRO 6000 has: compiled for it, loaded by a driver that is none."""
    pretend("--capability", "12.0")
    import triton
    import triton.language as tl
    from triton.runtime import driver

    @triton.jit
    def too_large(a, b, c, M: tl.constexpr, K: tl.constexpr):
        m, k = tl.arange(0, M), tl.arange(0, K)
        product = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * M + m[None, :]))
        tl.store(c + m[:, None] * M + m[None, :], product)

    compiled = _compile(too_large, 120, {"a": "*fp16", "b": "*fp16", "c": "*fp32"}, {"M": 128, "K": 256})
    rtx_pro_6000 = SimpleNamespace(
        get_current_device=lambda: 0,
        launcher_cls=lambda *_: None,
        utils=SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 101_376}),
    )
    with patch.object(driver, "_active", rtx_pro_6000):
        _ = compiled.run


def gguf_model_type() -> None:
    pretend("--capability", "12.0")
    from transformers import PretrainedConfig
    from vllm_gguf_plugin.weights_adapter import default

    config = PretrainedConfig()
    config.model_type = "a_new_model"
    adapter = next(each for each in vars(default).values() if hasattr(each, "build_name_map"))
    adapter.build_name_map(SimpleNamespace(), SimpleNamespace(hf_config=config, trust_remote_code=False))


def deepgemm_nvcc() -> None:
    """DeepGEMM's own binary looks for nvcc where CUDA_HOME has none: C++ prints its exception, and the child ends."""
    import vllm

    library = next(Path(vllm.__file__).parent.glob("third_party/deep_gemm/_C_extension*.so"))
    with tempfile.TemporaryDirectory() as cuda_home:
        ask = "import ask_deep_gemm as a, ctypes, sys, torch; torch.ops.load_library(sys.argv[1]);"
        ask += "a.ask(ctypes.CDLL(sys.argv[1]), {'CUDA_HOME': sys.argv[2]}, 1)"
        command = [sys.executable, "-c", ask, str(library), cuda_home]
        process = subprocess.run(command, cwd=HERE.parents[1] / "backend", capture_output=True, text=True)
    what = next(line for line in process.stderr.splitlines() if "what():" in line)
    raise RuntimeError(what.partition("what():")[2].strip())  # what pybind11 makes of it


def deepgemm_missing() -> None:
    config = pretend("--capability", "10.0")  # the GPU with which only DeepGEMM serves
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import sparse_attn_indexer

    with (
        set_current_vllm_config(config),
        patch.object(sparse_attn_indexer, "has_deep_gemm", lambda: False),
    ):
        cache = SimpleNamespace(prefix="indexer")
        sparse_attn_indexer.SparseAttnIndexer(cache, 128, "ue8m0", 2048, 128, 4096, 8192, None)


def dcp_16_bit() -> None:
    config = pretend("--capability", "9.0", "--dtype", "bfloat16", "-tp", "8", "-dcp", "8")
    from vllm.config import set_current_vllm_config
    from vllm.sm120.doctor import skeleton

    with set_current_vllm_config(config):
        skeleton._build(config)


def worker_silent() -> None:
    """A queue whose reader never reads, with a warning after a second."""
    from vllm.distributed.device_communicators import shm_broadcast

    with patch.object(shm_broadcast, "VLLM_RINGBUFFER_WARNING_INTERVAL", 1):
        queue = shm_broadcast.MessageQueue(1, 1, max_chunks=1)
        queue.enqueue("one")
        queue.enqueue("two", timeout=3)


def no_memory_for_the_cache() -> None:
    from vllm.v1.core.kv_cache_planning import _check_enough_kv_cache_memory

    _check_enough_kv_cache_memory(-1, lambda: 1, 1, lambda _: 1)


def context_too_long() -> None:
    from vllm.v1.core.kv_cache_planning import _check_enough_kv_cache_memory

    _check_enough_kv_cache_memory(2**30, lambda: 2**34, 202752, lambda available: 12000)


def no_gpu() -> None:
    from vllm import platforms
    from vllm.config import DeviceConfig

    with patch.object(platforms, "_current_platform", None):  # vLLM looks again
        DeviceConfig()


FAILURES = {
    function.__name__.replace("_", "-"): function
    for function in (
        no_backend,
        backend_refuses,
        flashinfer_too_old,
        flashinfer_missing,
        fp8e4nv,
        shared_memory,
        gguf_model_type,
        deepgemm_nvcc,
        deepgemm_missing,
        dcp_16_bit,
        worker_silent,
        no_memory_for_the_cache,
        context_too_long,
        no_gpu,
    )
}

if __name__ == "__main__":
    print(server_log(FAILURES[sys.argv[1]]), end="")
