"""What upstream's attention tests need around them: a pytest plugin, for a process with this folder on PYTHONPATH.

Upstream's own conftest imports its whole test tree and requirements. The fixtures here do the same for the
attention tests, except that one process group serves all of them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    """A default configuration, the current one during the test."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture(scope="session")
def dist_init(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Parallel groups that hold this process alone."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    store = tmp_path_factory.mktemp("process-group") / "store"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}", backend="nccl"
        )
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture
def workspace_init() -> Iterator[None]:
    """A new workspace manager, unlocked."""
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    init_workspace_manager(torch.device("cuda", 0))
    yield
    reset_workspace_manager()


@pytest.fixture(autouse=True)
def rope_tail_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let float16 keys enter an fp8_ds_mla cache as the backend writes them: with a bfloat16 RoPE tail.

    The tests call upstream's cache writer themselves, and it copies the 16 bits of the tail as they are.
    """
    from vllm import _custom_ops

    write = _custom_ops.concat_and_cache_mla

    def write_bfloat16_tail(
        kv_c: torch.Tensor, k_pe: torch.Tensor, *args: Any, kv_cache_dtype: str, **kwargs: Any
    ) -> None:
        if kv_cache_dtype == "fp8_ds_mla" and k_pe.dtype == torch.float16:
            k_pe = k_pe.bfloat16().view(torch.float16)
        write(kv_c, k_pe, *args, kv_cache_dtype=kv_cache_dtype, **kwargs)

    monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", write_bfloat16_tail)


def pytest_report_header() -> str:
    """Say which vLLM is tested."""
    import vllm

    return f"vllm {vllm.__version__} of {Path(vllm.__file__).parent}"
