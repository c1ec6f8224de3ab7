"""An MTP layer as a draft model: where its configuration comes from, and what the loader does with it."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.gguf import tiny


@pytest.mark.parametrize("option", [True, False], ids=["hf-config-path", "tokenizer"])
@pytest.mark.parametrize("beside", [False, True], ids=["no other", "another beside the weights"])
def test_a_draft_has_the_config_that_the_target_has(beside, option, tmp_path):
    """With --hf-config-path, and with a --tokenizer in whose folder the plugin has found a config.json."""
    import vllm_gguf_plugin
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

    vllm_gguf_plugin.register()
    files = tiny.write(tmp_path / "weights", mtp=True)
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(files.config | {"marker": "given"}))
    if beside:
        (tmp_path / "weights/config.json").write_text(json.dumps(files.config | {"marker": "beside"}))
    target = ModelConfig(
        str(folder),
        hf_config_path=str(folder) if option else None,
        model_weights=str(files.files[-1]),
        skip_tokenizer_init=True,
        quantization="gguf",
        config_format="gguf",
        dtype="float16",
        max_model_len=1024,
    )
    draft = SpeculativeConfig(
        method="mtp", num_speculative_tokens=1, target_model_config=target, target_parallel_config=ParallelConfig()
    ).draft_model_config
    assert draft.model == target.model_weights, "the draft's weights are in the same file"
    assert draft.architectures == ["DeepseekV32MTPModel"]
    assert draft.hf_config.marker == target.hf_config.marker == "given"


@pytest.mark.parametrize("is_draft", [False, True], ids=["target", "draft"])
def test_the_loader_builds_what_it_is_asked_for(is_draft, monkeypatch):
    from vllm.config.load import LoadConfig
    from vllm_gguf_plugin import GGUFConfig, GGUFModelLoader
    from vllm_gguf_plugin import loader as module

    built = Mock()
    monkeypatch.setattr(module, "initialize_model", built)
    monkeypatch.setattr(module, "process_weights_after_loading", Mock())
    adapter = Mock(load_spec=SimpleNamespace(unquantized_modules=["norm"]))
    monkeypatch.setattr(GGUFModelLoader, "_prepare_adapter", lambda self, config: adapter)

    target = SimpleNamespace(hf_config="target's", dtype=torch.float16)
    draft = SimpleNamespace(hf_config="draft's", dtype=torch.float16)
    vllm_config = SimpleNamespace(
        model_config=target, device_config=SimpleNamespace(device="cpu"), quant_config=GGUFConfig()
    )
    asked = draft if is_draft else target
    GGUFModelLoader(LoadConfig(load_format="gguf")).load_model(vllm_config, asked)

    assert built.call_args.kwargs["model_config"] is asked
    assert (target.hf_config, draft.hf_config) == ("target's", "draft's")
    assert vllm_config.quant_config.unquantized_modules == ["norm"]
