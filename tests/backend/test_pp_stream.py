"""The first rank of a pipeline waits for sampled tokens on the stream that runs the model."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.utils import torch_utils
from vllm.v1.worker.gpu import pp_utils


class Stream:
    """In place of torch.cuda.Stream, which needs a GPU."""

    def __init__(self, device: object = None) -> None:
        self.device = device

    def wait_stream(self, stream: "Stream") -> None:
        pass


@pytest.fixture
def torch_streams(monkeypatch):
    """Torch's streams of a process in which vLLM has not chosen its own yet; the current one is in a list."""
    current = [Stream()]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[0])
    monkeypatch.setattr(torch_utils, "prev_set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(torch_utils._current_stream_tls, "value", None, raising=False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    return current


@pytest.mark.parametrize("is_chosen", [True, False], ids=["with PyNCCL", "without PyNCCL"])
def test_it_is_the_stream_that_stays(torch_streams, monkeypatch, is_chosen):
    group = SimpleNamespace(is_last_rank=False, last_rank=1, world_size=2, make_sibling_device_group=lambda **_: None)
    monkeypatch.setattr(pp_utils, "get_pp_group", lambda: group)
    if is_chosen:  # PyNCCL's constructor does
        torch_utils.current_stream()
    handler = pp_utils.PPHandler(max_num_reqs=1, num_speculative_steps=0, device=torch.device("cuda"))
    assert torch_utils.current_stream() is torch_streams[0]
    assert handler.main_stream is torch_streams[0]
