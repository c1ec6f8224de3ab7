"""The plugin's compiled kernels, where they cannot be loaded."""

import importlib
import logging
import sys

import pytest
import torch


@pytest.fixture
def load_ops(monkeypatch):
    """Load the plugin's ops with an extension that ends with an ImportError."""
    from vllm_gguf_plugin import ops

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delattr("vllm_gguf_plugin._C_gguf", raising=False)
    monkeypatch.setitem(sys.modules, "vllm_gguf_plugin._C_gguf", None)
    yield lambda: importlib.reload(ops)
    monkeypatch.undo()
    importlib.reload(ops)


@pytest.mark.parametrize("wanted", ["1", "0"])
def test_a_fallback_to_triton_is_noticed(wanted, load_ops, monkeypatch):
    monkeypatch.setenv("VLLM_GGUF_USE_CUDA", wanted)
    messages: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.vllm_gguf_plugin.ops"), "handle", lambda r: messages.append(r.getMessage())
    )
    assert not load_ops()._CUDA_ENABLED
    if wanted == "1":
        (message,) = messages
        assert message.startswith(
            "The GGUF plugin's compiled kernels cannot be loaded, and Triton's are used instead: "
        )
    else:
        assert messages == []
