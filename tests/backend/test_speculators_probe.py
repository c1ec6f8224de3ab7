"""The probe for speculators models must not end the start of a model whose config is elsewhere, or nowhere.

Real files and a real, empty cache of the Hub; nothing here may use the network.
"""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
import transformers.utils.hub
import vllm.engine.arg_utils as arg_utils
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from vllm.sm120 import speculators_probe
from vllm.transformers_utils import config as config_module

# What the plugins of this environment replaced is wrapped: this is vLLM's own.
probe = inspect.unwrap(config_module.maybe_override_with_speculators)

GLM5 = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}
UNKNOWN = {"architectures": ["NobodyKnowsForCausalLM"], "model_type": "nobody_knows"}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 32000,
    "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1},
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "org/verifier", "architectures": ["LlamaForCausalLM"]},
    },
}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def log(monkeypatch):
    log = Mock()
    monkeypatch.setattr(speculators_probe.logger, "info", log)
    return log


@pytest.fixture
def model(tmp_path):
    """Writes a model's directory: a GGUF file and, if given, a config.json."""

    def write(config=None, name="model") -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "model-Q8_0.gguf").write_bytes(b"GGUF")
        if config is not None:
            text = config if isinstance(config, str) else json.dumps(config)
            (directory / "config.json").write_text(text)
        return str(directory)

    return write


def run(model: str, **kwargs):
    """The probe's answer, in the way that EngineArgs calls it."""
    return probe(model=model, tokenizer="org/tokenizer", trust_remote_code=False, **kwargs)


def unchanged(model: str):
    return model, "org/tokenizer", None


@pytest.mark.parametrize(
    "name",
    ["org/model:Q4_K_M", "org/model:UD-Q2_K_XL", "org/model:my-own-quant", "org/model/model-Q8_0.gguf"],
)
def test_a_name_that_is_no_repo_id_has_no_speculators_config(name, log):
    assert run(name) == unchanged(name)
    log.assert_called_once()
    assert name in log.call_args.args


def test_a_local_directory_with_a_quant_has_no_speculators_config(model, log):
    name = f"{model()}:Q8_0"
    assert run(name) == unchanged(name)
    log.assert_called_once()


def test_a_directory_with_gguf_files_only_has_no_speculators_config(model, log):
    directory = model()
    assert run(directory) == unchanged(directory)
    log.assert_called_once_with("No speculators config for %s: %s", directory, "it has no config.json")


def test_hf_config_path_is_read_instead_of_the_models_own_config(model):
    broken = model("{ not json")
    assert run(broken, hf_config_path=model(GLM5, "config")) == unchanged(broken)


@pytest.mark.parametrize("name", ["org/model:Q4_K_M", "org/not-in-the-cache"])
def test_hf_config_path_is_read_instead_of_looking_for_the_model(name, model, log):
    assert run(name, hf_config_path=model(GLM5, "config")) == unchanged(name)
    log.assert_not_called()


def test_a_speculators_config_in_the_model_does_not_count_with_hf_config_path(model):
    draft = model(SPECULATORS)
    assert run(draft, hf_config_path=model(GLM5, "config")) == unchanged(draft)


def test_a_speculators_config_at_hf_config_path_counts(model):
    draft = model()
    resolved, tokenizer, speculative = run(draft, hf_config_path=model(SPECULATORS, "config"))
    assert (resolved, tokenizer) == ("org/verifier", "org/verifier")
    assert (speculative["method"], speculative["model"]) == ("eagle3", draft)


def start(monkeypatch, **arguments) -> arg_utils.EngineArgs:
    """Bring the engine's arguments to where the model's config is read for good."""

    class ReachedError(Exception):
        pass

    def create_model_config(self):
        raise ReachedError

    monkeypatch.setattr(arg_utils, "current_platform", Mock())
    monkeypatch.setattr(arg_utils, "DeviceConfig", Mock())
    monkeypatch.setattr(arg_utils.EngineArgs, "create_model_config", create_model_config)
    engine_args = arg_utils.EngineArgs(**arguments)
    with pytest.raises(ReachedError):
        engine_args.create_engine_config()
    return engine_args


def test_the_engine_passes_hf_config_path_on(monkeypatch, model):
    broken = model("{ not json")
    assert start(monkeypatch, model=broken, hf_config_path=model(GLM5, "config")).model == broken


def test_the_engine_passes_hf_config_path_through_the_gguf_plugin(monkeypatch, model):
    plugin = pytest.importorskip("vllm_gguf_plugin.plugin", reason="vllm-gguf-plugin is not installed")
    for module in (arg_utils, config_module):
        monkeypatch.setattr(module, "maybe_override_with_speculators", probe)
        monkeypatch.setattr(module, "_gguf_speculator_probe_patched", False, raising=False)
    plugin._patch_speculator_probe()
    assert arg_utils.maybe_override_with_speculators.__wrapped__ is probe

    broken = model("{ not json")
    assert start(monkeypatch, model=broken, hf_config_path=model(GLM5, "config")).model == broken
    gguf = str(Path(broken) / "model-Q8_0.gguf")
    assert start(monkeypatch, model=gguf, hf_config_path=broken).model == gguf


# What upstream does right and must go on doing.


def test_a_config_of_an_unknown_architecture_has_no_speculators_config(model, log):
    directory = model(UNKNOWN)
    assert run(directory) == unchanged(directory)
    log.assert_not_called()


def test_a_single_file_has_no_speculators_config(model):
    gguf = str(Path(model()) / "model-Q8_0.gguf")
    assert run(gguf) == unchanged(gguf)


def test_a_speculators_model_is_still_found(model):
    draft = model(SPECULATORS)
    resolved, _, speculative = run(draft)
    assert (resolved, speculative["model"]) == ("org/verifier", draft)


@pytest.mark.parametrize("broken", ["{ not json", ""])
def test_broken_json_ends_the_start(model, broken):
    with pytest.raises(OSError, match="is not a valid JSON file"):
        run(model(broken))
    with pytest.raises(OSError, match="is not a valid JSON file"):
        run(model(name="weights"), hf_config_path=model(broken, "config"))


def test_a_model_that_is_not_in_the_cache_ends_an_offline_start():
    with pytest.raises(OSError, match="couldn't find them in the cached files"):
        run("org/not-in-the-cache")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "You are trying to access a gated repo"),
        (RepositoryNotFoundError, "is not a valid model identifier"),
        (RevisionNotFoundError, "nope is not a valid git identifier"),
    ],
)
def test_no_access_and_an_unknown_revision_end_the_start(monkeypatch, error, message):
    # The Hub's answer, as transformers sees it.
    def download(*args, **kwargs):
        raise error("refused", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(transformers.utils.hub, "hf_hub_download", download)
    with pytest.raises(OSError, match=message):
        run("org/model", revision="nope")
