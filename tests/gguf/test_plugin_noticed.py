"""A patched vLLM beside a GGUF plugin that is not patched."""

import json
from pathlib import Path

import pytest

FIX = {"name": "tensor-parallel-rank.patch"}


def install_plugin(folder: Path, version: str, patches: list[dict] | None) -> None:
    """What an installation leaves of a plugin; None: it is upstream's, without provenance."""
    info = folder / f"vllm_gguf_plugin-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm-gguf-plugin\nVersion: {version}\n")
    if patches is not None:
        provenance = folder / "vllm_gguf_plugin/sm120/provenance.json"
        provenance.parent.mkdir(parents=True)
        provenance.write_text(json.dumps({"schema": 1, "patches": patches}))


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a plugin in front of the environment's own."""
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *args: install_plugin(tmp_path, *args)


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    from vllm.sm120 import gguf_plugin

    messages: list[str] = []
    monkeypatch.setattr(gguf_plugin.logger, "warning_once", lambda text, *args: messages.append(text % args))
    return messages


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_the_patched_plugin_is_fine(tensor_parallel_size, plugin, warnings):
    from vllm.sm120.gguf_plugin import check_gguf_plugin

    plugin("0.0.5+sm120.3", [{"name": "another.patch"}, FIX])
    check_gguf_plugin(tensor_parallel_size)
    assert warnings == []


@pytest.mark.parametrize(
    ("version", "patches"), [("0.0.5", None), ("0.0.5+sm120.2", []), ("0.0.4", None)], ids=["stock", "early", "older"]
)
def test_a_plugin_without_the_fix_is_noticed_and_refused_where_it_corrupts(version, patches, plugin, warnings):
    from vllm.sm120.gguf_plugin import check_gguf_plugin

    plugin(version, patches)
    check_gguf_plugin(1)
    (warning,) = warnings
    assert warning.startswith(f"vllm-gguf-plugin {version} is not the one that this vLLM")
    assert "install `vllm[gguf]==" in warning
    with pytest.raises(ValueError, match=r"--tensor-parallel-size 2 .* would be wrong. Use one GPU, or install"):
        check_gguf_plugin(2)


def test_a_later_release_has_the_fix(plugin, warnings):
    from vllm.sm120.gguf_plugin import check_gguf_plugin

    plugin("0.0.6", None)
    check_gguf_plugin(2)
    assert len(warnings) == 1


@pytest.mark.parametrize(("tensor_parallel_size", "refused"), [(1, False), (2, True)])
def test_an_engine_is_refused_before_it_loads_anything(tensor_parallel_size, refused, plugin, tmp_path):
    import vllm_gguf_plugin
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    vllm_gguf_plugin.register()
    plugin("0.0.5", None)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    configs = {
        "model_config": ModelConfig(str(tmp_path), skip_tokenizer_init=True, quantization="gguf", dtype="float16"),
        "parallel_config": ParallelConfig(
            tensor_parallel_size=tensor_parallel_size, distributed_executor_backend="external_launcher"
        ),
        "device_config": DeviceConfig("cpu"),
        "load_config": LoadConfig(load_format="gguf"),
    }
    if refused:
        with pytest.raises(ValueError, match="loads the first GPU's part of fused layers on every GPU"):
            VllmConfig(**configs)
    else:
        VllmConfig(**configs)
