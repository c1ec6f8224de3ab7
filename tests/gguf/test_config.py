"""The configuration of a GGUF model: from the file's metadata, in agreement with a config.json where there is one."""

import inspect
import json
import math
from pathlib import Path

import huggingface_hub
import pytest
from transformers import AutoTokenizer
from vllm.config import ModelConfig, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm_gguf_plugin import glm_dsa_config
from vllm_gguf_plugin.config_parser import GGUFConfigParser
from vllm_gguf_plugin.gguf_files import read_headers
from vllm_gguf_plugin.gguf_header import GGUFFileError

from . import header

# GLM-5.2, as published (unsloth GLM-5.2-UD-IQ2_XXS): its file has these keys and no others of the model.
GLM_5_2 = {
    "vocab_size": 154880,
    "context_length": 1048576,
    "embedding_length": 6144,
    "feed_forward_length": 12288,
    "block_count": 79,
    "nextn_predict_layers": 1,
    "leading_dense_block_count": 3,
    "attention.head_count": 64,
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 256,
    "attention.value_length_mla": 256,
    "attention.q_lora_rank": 2048,
    "attention.kv_lora_rank": 512,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 64,
    "rope.freq_base": 8_000_000.0,
    "expert_count": 256,
    "expert_used_count": 8,
    "expert_shared_count": 1,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_feed_forward_length": 2048,
    "expert_gating_func": 2,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "attention.indexer.head_count": 32,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 2048,
}
# DeepSeek-V3.2 by its converter (conversion/deepseek.py).
DEEPSEEK = GLM_5_2 | {
    "vocab_size": 129280,
    "context_length": 163840,
    "embedding_length": 7168,
    "feed_forward_length": 18432,
    "block_count": 62,
    "attention.head_count": 128,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "attention.q_lora_rank": 1536,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10_000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 4096,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "expert_group_count": 8,
    "expert_group_used_count": 4,
    "attention.indexer.head_count": 64,
}
TOKENS = {"tokenizer.ggml.bos_token_id": 9, "tokenizer.ggml.eos_token_id": 10, "tokenizer.ggml.eot_token_id": 11,
          "tokenizer.ggml.eom_token_id": 10}  # fmt: skip


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def glm(tmp_path):
    """Writes a file of metadata, GLM-5.2's with changes; None leaves a key out."""

    def write(keys: dict = GLM_5_2, arch: str = "glm-dsa", **changes) -> Path:
        changes = {name.replace("__", "."): value for name, value in changes.items()}
        general = {name: changes.pop(name) for name in list(changes) if name.startswith(("general.", "tokenizer."))}
        metadata = {f"{arch}.{name}": value for name, value in (keys | changes).items() if value is not None}
        path = tmp_path / "repository" / "Q8_0" / "GLM-5.2-Q8_0.gguf"
        return header.write(path, metadata | TOKENS | general, arch=arch)

    return write


def build(path: Path) -> dict:
    return glm_dsa_config.build(read_headers([path]))


def parse(path: Path):
    """The config as vLLM gets it."""
    return GGUFConfigParser().parse(str(path), trust_remote_code=False)[1]


def test_glm_5_2(glm):
    """All that GLM-5.2's own config.json says and vLLM reads."""
    assert build(glm()) == {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 78,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk_pattern": "FF" + 19 * "FSSS",
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8_000_000.0},
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 9,
        "eos_token_id": [10, 11],
        "pad_token_id": None,
        "dtype": "bfloat16",
    }


def test_vllm_gets_the_class_of_glm_5(glm):
    config = parse(glm())
    assert type(config).__name__ == "GlmMoeDsaConfig"
    assert config.mlp_layer_types == 3 * ["dense"] + 75 * ["sparse"]
    assert [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"] == [0, 1, *range(2, 78, 4)]
    assert (config.num_nextn_predict_layers, config.topk_method, config.scoring_func) == (1, "noaux_tc", "sigmoid")


def test_vllm_gets_deepseek_v3_2(glm):
    config = parse(glm(DEEPSEEK, "deepseek32"))
    assert config.architectures == ["DeepseekV32ForCausalLM"]
    assert config.model_type == "deepseek_v32"
    assert config.indexer_rope_interleave is False
    assert (config.n_group, config.topk_group, config.qk_nope_head_dim, config.v_head_dim) == (8, 4, 128, 128)
    assert (config.num_hidden_layers, config.index_n_heads, config.rms_norm_eps) == (61, 64, 1e-6)
    assert getattr(config, "index_topk_pattern", None) is None
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert {name: config.rope_parameters[name] for name in rope} == rope


@pytest.mark.parametrize(
    ("context", "types", "pattern"),
    [
        (202752, None, 78 * "F"),  # GLM-5, 5.1
        (1048576, None, "FF" + 19 * "FSSS"),
        (202752, [True] + 77 * [False], "F" + 77 * "S"),
        (1048576, 79 * [1], 78 * "F"),  # one for the MTP block too
        (1048576, ["full", *(77 * ["shared"])], "F" + 77 * "S"),
    ],
)
def test_which_layers_have_an_indexer(glm, context, types, pattern):
    path = glm(context_length=context, attention__indexer__types=types)
    assert build(path)["index_topk_pattern"] == pattern


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_length": None}, "key glm-dsa.embedding_length is missing.*current llama.cpp"),
        ({"embedding_length": 0}, "key glm-dsa.embedding_length is '0'"),
        ({"embedding_length": "6144"}, "key glm-dsa.embedding_length is '6144'"),
        ({"feed_forward_length": [1, 2]}, r"key glm-dsa.feed_forward_length is '\[1, 2\]'"),
        ({"expert_count": True}, "key glm-dsa.expert_count is 'True'"),
        ({"expert_weights_scale": math.nan}, "key glm-dsa.expert_weights_scale is 'nan'"),
        ({"rope__freq_base": math.inf}, "key glm-dsa.rope.freq_base is 'inf'"),
        ({"attention__layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon is '0.0'"),
        ({"expert_weights_norm": 1}, "expert_weights_norm is '1'"),
        ({"attention__key_length_mla": 64}, "heads of 64 have no part without RoPE"),
        ({"attention__key_length_mla": None}, "key glm-dsa.attention.key_length_mla is missing"),
        ({"nextn_predict_layers": 79}, "of 79 blocks 79 are for multi-token prediction"),
        # A list of each layer's properties would take gigabytes.
        ({"block_count": 2**31 - 1}, "block_count is '2147483647'"),
        ({"expert_used_count": 257}, "numbers of experts and of groups contradict"),
        ({"expert_group_count": 7}, "numbers of experts and of groups contradict"),
        ({"expert_gating_func": 5}, "gating function 5 of the experts is unknown"),
        ({"rope__scaling__type": "longrope"}, "RoPE scaling 'longrope' is unknown"),
        ({"attention__indexer__types": [1, 0]}, r"indexer.types is '\[1, 0\]', not one of full .* each of 78 layers"),
        ({"attention__indexer__types": 78 * [2]}, "indexer.types is"),
        ({"attention__indexer__types": 78 * [0]}, "the first one full"),
        ({"vocab_size": None}, "vocab_size is None"),
    ],
)
def test_names_what_is_wrong_with_the_metadata(glm, changes, message):
    with pytest.raises(GGUFFileError, match=message) as error:
        build(glm(**changes))
    assert "GLM-5.2-Q8_0.gguf" in str(error.value)


def test_optional_keys(glm):
    """What converters leave out where it is the default, as llama.cpp reads it."""
    optional = ("nextn_predict_layers", "expert_gating_func", "expert_weights_norm", "expert_weights_scale",
                "expert_group_count", "expert_group_used_count", "leading_dense_block_count")  # fmt: skip
    config = build(glm(**dict.fromkeys(optional)))
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (79, 0)
    assert (config["scoring_func"], config["norm_topk_prob"], config["routed_scaling_factor"]) == ("sigmoid", False, 1)
    assert (config["n_group"], config["topk_group"], config["first_k_dense_replace"]) == (1, 1, 0)


def test_the_vocabulary_is_that_of_the_embeddings(tmp_path, glm):
    keys = {f"glm-dsa.{name}": value for name, value in GLM_5_2.items()}
    path = header.write(tmp_path / "x.gguf", keys, ("token_embd.weight",), arch="glm-dsa")
    with pytest.raises(GGUFFileError, match=r"vocab_size is 154880, and token_embd.weight has 2 rows"):
        build(path)
    del keys["glm-dsa.vocab_size"]
    path = header.write(tmp_path / "x.gguf", keys, ("token_embd.weight", "output.weight"), arch="glm-dsa")
    assert (build(path)["vocab_size"], build(path)["tie_word_embeddings"]) == (2, False)


# ---------------------------------------------------------------- beside a config.json


def published(path: Path) -> dict:
    """A config.json in the form of the publisher's, which has what the file has not, and the other way round."""
    config = build(path)
    for name in ("topk_method", "scoring_func", "indexer_rope_interleave", "index_topk_pattern"):
        del config[name]
    config |= {"index_topk_freq": 4, "index_skip_topk_offset": 3, "ep_size": 1, "eos_token_id": [10, 11, 12]}
    config["quantization_config"] = {"quant_method": "fp8"}
    return config


@pytest.mark.parametrize("above", [False, True])
def test_a_config_beside_the_file_or_above_its_quant(glm, above):
    path = glm()
    folder = path.parent.parent if above else path.parent
    (folder / "config.json").write_text(json.dumps(published(path)))
    config = parse(path)
    assert config.eos_token_id == [10, 11, 12]
    # And what it leaves out.
    assert (config.topk_method, config.scoring_func, config.indexer_rope_interleave) == ("noaux_tc", "sigmoid", True)
    assert config.index_topk_pattern == "FF" + 19 * "FSSS"
    assert not hasattr(config, "quantization_config")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 5120, r"hidden_size: '6144' in .*GLM-5.2-Q8_0.gguf' \(glm-dsa.embedding_length\), '5120' in"),
        ("model_type", "deepseek_v32", r"'glm_moe_dsa' in .* \(general.architecture\), 'deepseek_v32' in"),
        ("rms_norm_eps", 1e-6, "rms_norm_eps: '1e-05' in .*, '1e-06' in"),
        ("norm_topk_prob", False, "norm_topk_prob: 'True' in .*, 'False' in"),
        ("num_hidden_layers", 61, r"num_hidden_layers: '78' in .* \(glm-dsa.block_count\), '61' in"),
        ("scoring_func", "softmax", "scoring_func: 'sigmoid' in .*, 'softmax' in"),
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 1e6},
            "rope_theta: '8000000.0' in .*, '1000000.0' in",
        ),
    ],
)
def test_names_both_values_of_a_contradiction(glm, tmp_path, field, value, message):
    path = glm()
    (path.parent / "config.json").write_text(json.dumps(published(path) | {field: value}))
    with pytest.raises(GGUFFileError, match=message) as error:
        parse(path)
    assert str(path.parent) in str(error.value).splitlines()[1].rpartition(" in ")[2]


def test_indexers_that_the_file_states(glm):
    path = glm(attention__indexer__types=78 * [True])
    (path.parent / "config.json").write_text(json.dumps(published(path)))
    with pytest.raises(
        GGUFFileError, match=r"index_topk_pattern: 'FFFF.* \(glm-dsa.attention.indexer.types\), 'FFFSSS"
    ):
        parse(path)


def test_indexers_that_only_the_config_states(glm):
    path = glm()
    types = ["full", *(77 * ["shared"])]
    config = published(path) | {"indexer_types": types}
    (path.parent / "config.json").write_text(json.dumps(config))
    assert parse(path).index_topk_pattern == "F" + 77 * "S"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.json' is not JSON"),
        ("{", "config.json' is not JSON"),
        (100_000 * "[", "config.json' is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"index_topk_pattern": "FX"}', "index_topk_pattern is 'FX' in .* not full or shared for each of 78 layers"),
        ('{"indexer_types": ["full"]}', "indexer_types is .* not full or shared for each of 78 layers"),
        ('{"index_topk_freq": 0}', "index_topk_freq is '0'"),
        ('{"rope_parameters": 1}', r"rope_theta: '8000000.0' in .*, 'None' in"),
    ],
)
def test_a_broken_config(glm, text, message):
    path = glm()
    (path.parent / "config.json").write_text(text)
    with pytest.raises(GGUFFileError, match=message):
        parse(path)


def test_a_file_without_its_mtp_block(glm):
    config = published(glm())
    path = glm(block_count=78, nextn_predict_layers=None)
    (path.parent / "config.json").write_text(json.dumps(config))
    assert parse(path).num_nextn_predict_layers == 0


def test_the_older_form_of_rope(glm):
    path = glm(DEEPSEEK, "deepseek32")
    config = build(path)
    del config["rope_parameters"]
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    config |= {"rope_theta": 10000, "rope_scaling": scaling | {"mscale": 1.0, "mscale_all_dim": 1.0}}
    (path.parent / "config.json").write_text(json.dumps(config))
    assert parse(path).rope_parameters["mscale_all_dim"] == 1.0
    config["rope_scaling"]["factor"] = 4
    (path.parent / "config.json").write_text(json.dumps(config))
    glm_dsa_config._folders.clear()
    with pytest.raises(GGUFFileError, match=r"factor: '40.0' in .*, '4' in"):
        parse(path)


def test_other_models_are_left_to_the_plugin(tmp_path):
    path = header.write(tmp_path / "x.gguf", {}, arch="llama")
    assert glm_dsa_config.config_folder(path) is None


# ---------------------------------------------------------------- vLLM


def engine_args(**kwargs) -> dict:
    """What ModelConfig is given."""
    args = EngineArgs(**kwargs)
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.engine.arg_utils.ModelConfig", lambda **kwargs: seen.update(kwargs))
        args.create_model_config()
    return seen


def test_the_config_counts_also_with_a_tokenizer_elsewhere(glm, tmp_path):
    """A tokenizer's folder often has a config.json, of whichever model it was copied from."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "config.json").write_text('{"model_type": "llama"}')
    seen = engine_args(model=str(glm()), tokenizer=str(tmp_path / "tokenizer"))
    config = json.loads((Path(seen["hf_config_path"]) / "config.json").read_text())
    assert config["model_type"] == "glm_moe_dsa"
    assert seen["tokenizer"] == str(tmp_path / "tokenizer")


def test_the_config_at_hf_config_path(glm, tmp_path):
    path = glm()
    (path.parent / "config.json").write_text("broken, and not asked for")
    (tmp_path / "base").mkdir()
    config = published(path)
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    seen = engine_args(model=str(path), hf_config_path=str(tmp_path / "base"))
    merged = json.loads((Path(seen["hf_config_path"]) / "config.json").read_text())
    assert merged["ep_size"] == 1
    assert merged["topk_method"] == "noaux_tc"
    assert seen["generation_config"] == seen["tokenizer"] == str(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"v_head_dim": 128}))
    with pytest.raises(GGUFFileError, match=f"v_head_dim: '256' in .*, '128' in {tmp_path}/base"):
        engine_args(model=str(path), hf_config_path=str(tmp_path / "base"))


def test_a_tokenizer_is_found_or_asked_for(glm):
    path = glm()
    with pytest.raises(GGUFFileError, match=r"no tokenizer beside it.*--tokenizer zai-org/GLM-5,"):
        engine_args(model=str(path))
    path = glm(**{"general.base_model.0.repo_url": "https://huggingface.co/zai-org/GLM-5.2"})
    with pytest.raises(GGUFFileError, match=r"--tokenizer zai-org/GLM-5.2,"):
        engine_args(model=str(path))
    assert engine_args(model=str(path), skip_tokenizer_init=True)["tokenizer"] is None
    (path.parent.parent / "tokenizer.json").write_text("{}")
    assert engine_args(model=str(path))["tokenizer"] == str(path.parent.parent)


def test_transformers_makes_no_tokenizer_from_such_a_file(glm):
    """Why one has to be given: when this fails, the file's own can be offered."""
    path = glm(**{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "glm4", "tokenizer.ggml.tokens": ["a", "b"]})
    with pytest.raises(ValueError, match="architecture glm-dsa is not supported"):
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_sampling_recommended_by_the_file(glm):
    path = glm(**{"general.sampling.temp": 0.7, "general.sampling.top_p": 0.95})
    config = EngineArgs(model=str(path), skip_tokenizer_init=True).create_model_config()
    assert config.get_diff_sampling_param() == {"temperature": 0.7, "top_p": 0.95}
    assert config.try_get_generation_config()["eos_token_id"] == [10, 11]
    assert config.max_model_len == 1048576
    assert config.hf_config.num_hidden_layers == 78


def test_the_draft_model_of_the_same_file(glm):
    """SpeculativeConfig makes the config of the MTP layer from the path of the weights."""
    target = EngineArgs(model=str(glm()), skip_tokenizer_init=True).create_model_config()
    assert "model_weights" in inspect.getsource(SpeculativeConfig.__post_init__)
    draft = ModelConfig(
        model=target.model_weights,
        runner="draft",
        tokenizer=target.tokenizer,
        skip_tokenizer_init=True,
        quantization=target.quantization,
        config_format=target.config_format,
        hf_overrides=SpeculativeConfig.hf_config_override,
    )
    assert draft.hf_config.architectures == ["DeepseekV32MTPModel"]
    assert draft.hf_config.num_nextn_predict_layers == 1


@pytest.mark.parametrize("arch", ["glm-dsa", "deepseek32"])
def test_the_files_of_the_other_tests(tmp_path, arch):
    """Each number that a tiny file was made from comes back."""
    from . import tiny

    small = {"moe_intermediate_size": 256, "intermediate_size": 256}
    shared = arch == "glm-dsa"
    made = tiny.write(tmp_path / "tiny", arch=arch, shared_indexers=shared, mtp=True, shards=4, **small)
    config = glm_dsa_config.build(read_headers(made.files))
    extra = {"index_topk_freq", "index_skip_topk_offset", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert {name: config.get(name) for name in set(made.config) - extra} == {
        name: value for name, value in made.config.items() if name not in extra
    }
    assert config.get("index_topk_pattern") == ("FFFSS" if arch == "glm-dsa" else None)
