# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The model that vLLM builds on the GPU asked about, without its weights.

vLLM's own model class is built on torch's meta device, as one rank of the tensor
parallel group. So which kernels its layers take, how large its parameters are, and
what its KV cache holds is never calculated here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, patch

import torch
from torch.overrides import TorchFunctionMode

from vllm.sm120.doctor.facts import Case
from vllm.sm120.doctor.model import RefusedError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


@dataclass(frozen=True)
class Skeleton:
    model: torch.nn.Module
    workspace: int  # bytes that attention and indexer reserve for a step
    gguf_adapter: Any  # the GGUF plugin's, which knows how the files are loaded


@functools.lru_cache(maxsize=1)
def build(case: Case) -> Skeleton:
    """Return the model of `case`, built once.

    Raises:
        RefusedError: vLLM does not build this model with this configuration.
    """
    try:
        return _build(case.vllm_config)
    except (ValueError, NotImplementedError) as error:  # vLLM's and its plugins' own
        text = str(error).strip() or type(error).__name__
        raise RefusedError(text.splitlines()[0]) from error


def _build(config: VllmConfig) -> Skeleton:
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.sm120.doctor.gguf import is_gguf, plan_loading
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker import workspace

    meta = torch.device("meta")
    # Layers register themselves there, each name once.
    config.compilation_config.static_forward_context.clear()
    with ExitStack() as stack:
        stack.enter_context(_one_rank(config.parallel_config))
        stack.enter_context(_no_gpu_needed())
        # Attention layers write there what their backend makes of the format.
        cache = config.cache_config
        stack.enter_context(patch.object(cache, "cache_dtype", cache.cache_dtype))
        manager = workspace.WorkspaceManager(meta)
        stack.enter_context(patch.object(workspace, "_manager", manager))
        adapter = None
        if is_gguf(config):
            adapter = plan_loading(config)
            spec = adapter.load_spec
            config.quant_config.unquantized_modules.extend(spec.unquantized_modules)
        stack.enter_context(set_default_torch_dtype(config.model_config.dtype))
        stack.enter_context(meta)
        stack.enter_context(_OnMeta())
        model = initialize_model(config)
    workspaces = [each for each in manager._current_workspaces if each is not None]
    return Skeleton(model, sum(each.nbytes for each in workspaces), adapter)


@contextmanager
def _one_rank(parallel: ParallelConfig) -> Iterator[None]:
    """Be the first rank of groups that need no other process."""
    from vllm.distributed import parallel_state

    sizes = {
        "_WORLD": parallel.world_size,
        "_TP": parallel.tensor_parallel_size,
        "_PP": parallel.pipeline_parallel_size,
        "_DP": parallel.data_parallel_size,
        "_EP": parallel.tensor_parallel_size * parallel.data_parallel_size,
        "_DCP": parallel.decode_context_parallel_size,
        "_PCP": parallel.prefill_context_parallel_size,
    }
    groups = {name: _group(size) for name, size in sizes.items()}
    with patch.multiple(parallel_state, **groups):
        yield


def _group(size: int) -> SimpleNamespace:
    processes = SimpleNamespace(size=lambda: size, rank=lambda: 0)
    return SimpleNamespace(
        world_size=size,
        rank=0,
        rank_in_group=0,
        local_rank=0,
        ranks=list(range(size)),
        is_first_rank=True,
        is_last_rank=size == 1,
        device=torch.device("meta"),
        device_group=processes,
        cpu_group=processes,
        device_communicator=None,
        use_device_communicator=False,
        unique_name="doctor",
    )


@contextmanager
def _no_gpu_needed() -> Iterator[None]:
    """Replace what constructors ask of CUDA and only a forward pass would use."""
    from vllm.model_executor.model_loader import utils as loader_utils
    from vllm.utils import torch_utils

    namespace = torch._ops._OpNamespace
    find_op = namespace.__getattr__

    def op_or_stub(self: Any, name: str) -> Any:
        try:
            return find_op(self, name)
        except AttributeError:
            # The wheel's namespaces; their modules are stubs, see host.py.
            if self.name.startswith("_") and not name.startswith("__"):
                return MagicMock()
            raise

    with (
        patch.object(namespace, "__getattr__", op_or_stub),
        patch.multiple(torch.cuda, Stream=MagicMock, Event=MagicMock),
        patch.object(torch.cuda, "current_device", lambda: torch.device("meta")),
        patch.object(torch_utils, "_aux_stream", MagicMock()),
        # Only for loading weights again; takes as long as the building.
        patch.object(loader_utils, "record_metadata_for_reloading"),
    ):
        yield


class _OnMeta(TorchFunctionMode):
    """Makes on the meta device what is asked for on a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = tuple(map(_to_meta, args))
        kwargs = {name: _to_meta(each) for name, each in (kwargs or {}).items()}
        return function(*args, **kwargs)


def _to_meta(argument: Any) -> Any:
    is_device = isinstance(argument, (str, torch.device))
    if is_device and str(argument).partition(":")[0] == "cuda":
        return torch.device("meta")
    return argument
