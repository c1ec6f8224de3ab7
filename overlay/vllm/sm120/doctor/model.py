# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a model is, as vLLM's own configuration sees it."""

import argparse
import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.sm120.doctor.arguments import SERVE_OPTIONS, flag
from vllm.sm120.doctor.facts import DoctorError, Fact, Model

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


_FILES = (".gguf", ".json")


class RefusedError(Exception):
    """vLLM itself refuses this configuration, before any backend is asked."""


def locate(arguments: argparse.Namespace) -> str:
    """Return MODEL as `vllm serve` takes it; keeps off the network if it can.

    Raises:
        DoctorError: It looks like a path, and nothing is there.
    """
    from huggingface_hub import constants

    name = arguments.model
    path = Path(name).expanduser()
    if not path.exists() and (name.count("/") != 1 or path.suffix in _FILES):
        raise DoctorError(
            f"MODEL {name} is no file or folder, and no repository id (ORG/NAME)"
        )
    sources = [name, arguments.hf_config_path]
    if not is_checkpoint(arguments):
        sources.append(arguments.tokenizer)  # the config of a GGUF file may be there
    if all(_is_here(each) for each in sources if each):
        constants.HF_HUB_OFFLINE = True
    if path.suffix == ".json" and path.is_file():
        return _folder_of(path)
    return str(path) if path.exists() else name


def _is_here(name: str) -> bool:
    """Tell whether the config of `name` can be read without the network."""
    from huggingface_hub import try_to_load_from_cache

    if Path(name).expanduser().exists():
        return True
    repository = name.partition(":")[0]  # ORG/NAME:Q4_K_M names a file in it
    return isinstance(try_to_load_from_cache(repository, "config.json"), str)


def is_checkpoint(arguments: argparse.Namespace) -> bool:
    """Tell whether MODEL is surely no GGUF: a local folder or config without any."""
    path = Path(arguments.model).expanduser()
    folder = path if path.is_dir() else path.parent
    is_config = path.suffix == ".json" or (path / "config.json").is_file()
    return is_config and not any(folder.glob("*.gguf"))


def served_name(name: str) -> str:
    """Return MODEL for the command: `vllm serve` takes no bare config.json."""
    path = Path(name)
    return str(path.parent) if path.suffix == ".json" else name


def _folder_of(config: Path) -> str:
    """Return a folder in which the file is config.json."""
    if config.name == "config.json":
        return str(config.parent)
    folder = Path(tempfile.mkdtemp(prefix="vllm-doctor-"))
    atexit.register(shutil.rmtree, folder)
    (folder / "config.json").symlink_to(config.resolve())
    return str(folder)


def configure(
    path: str, arguments: argparse.Namespace
) -> tuple["VllmConfig", str | None]:
    """Return what vLLM makes of the model at `path` on the current platform.

    With it comes why vLLM refuses nevertheless, if all that it misses is a tokenizer.

    Raises:
        DoctorError: The model or an option is not readable.
        RefusedError: vLLM refuses to run them here.
    """
    _inspect_models_in_process()
    options = {name: getattr(arguments, name) for name in SERVE_OPTIONS}
    options = {name: value for name, value in options.items() if value}
    if arguments.speculative_config:
        options["speculative_config"] = _parse_json(arguments.speculative_config)
    if arguments.max_model_len:
        options["max_model_len"] = _parse_length(arguments.max_model_len)
    # Its size is looked up in a module that needs the compiled operators.
    options["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    without_tokenizer = options | {"skip_tokenizer_init": True}
    if tokenizer := without_tokenizer.pop("tokenizer", None):
        # Nothing rests on it, but of a GGUF file the config may be beside it.
        with_tokenizer = without_tokenizer | {"tokenizer": tokenizer}
        if not is_checkpoint(arguments) and _is_here(tokenizer):
            return _create_config(path, with_tokenizer), None
        try:
            return _create_config(path, without_tokenizer), None
        except RefusedError as error:
            if not _misses_config(arguments, error):
                raise
            return _create_config(path, with_tokenizer), None
    try:
        return _create_config(path, options), None
    except RefusedError as error:
        try:
            return _create_config(path, without_tokenizer), str(error)
        except RefusedError:
            if not _misses_config(arguments, error):
                raise error from None
            raise RefusedError(
                f"{error} cure: --hf-config-path or --tokenizer with the original "
                "model, whose config.json is then read"
            ) from None


def _misses_config(arguments: argparse.Namespace, error: RefusedError) -> bool:
    """Tell whether transformers found no config of a GGUF file."""
    return not is_checkpoint(arguments) and "Unrecognized model in" in str(error)


def _create_config(path: str, options: dict[str, Any]) -> "VllmConfig":
    from pydantic import ValidationError

    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    try:
        arguments = EngineArgs(model=path, **options)
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        # As the worker does when it starts.
        current_platform.check_if_supports_dtype(config.model_config.dtype)
        return config
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] not in ("value_error", "assertion_error"):
            option = flag(str(first["loc"][0])) if first["loc"] else "an option"
            problem = f"{option}: {first['msg']}, got {first['input']!r}"
            raise DoctorError(problem) from error
        raise _refused(first["msg"].partition(", ")[2]) from error
    except OSError as error:
        raise DoctorError(
            f"MODEL {path}: {_one_line(error)}",
            "give a folder or file that is here, or download the repository",
        ) from error
    except (ValueError, NotImplementedError, RuntimeError, AssertionError) as error:
        raise _refused(str(error) or type(error).__name__) from error


def _refused(problem: str) -> Exception:
    """Tell a value that vLLM does not know from one that it cannot serve here."""
    if problem.startswith(("Unknown ", "Invalid ")):
        return DoctorError(" ".join(problem.split()))
    return RefusedError(" ".join(problem.split()))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _inspect_models_in_process() -> None:
    """Let vLLM look at model classes here and not in a child process.

    A child would not know the GPU that vLLM believes in, and imports all again.
    """
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda function: function()


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DoctorError(f"--speculative-config is not JSON: {error}") from error


def _parse_length(text: str) -> int:
    from vllm.utils.argparse_utils import human_readable_int_or_auto

    try:
        return human_readable_int_or_auto(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise DoctorError(f"--max-model-len {text}: {error}") from error


def describe(arguments: argparse.Namespace, vllm_config: "VllmConfig") -> Model:
    """Return the facts on which choices rest."""
    config = vllm_config.model_config
    parallel = vllm_config.parallel_config
    text_config = config.hf_text_config
    read = _config_source(arguments, config)

    def option(name: str, value: Any, default: str) -> Fact:
        given = getattr(arguments, name)
        return Fact(value, flag(name) if given else default)

    facts = {
        "architecture": Fact(config.architecture, f"architectures in {read}"),
        "mla": Fact(config.use_mla, f"model_type {text_config.model_type} in {read}"),
        "sparse": Fact(
            config.use_mla and getattr(text_config, "index_topk", None) is not None,
            f"index_topk in {read}",
        ),
    }
    for name in (
        "index_topk",
        "index_n_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ):
        if (value := getattr(text_config, name, None)) is not None:
            facts[name] = Fact(value, read)
    head_size = "kv_lora_rank + qk_rope_head_dim" if config.use_mla else read
    ranks = parallel.tensor_parallel_size
    facts |= {
        "head_size": Fact(config.get_head_size(), head_size),
        "heads": Fact(config.model_arch_config.total_num_attention_heads, read),
        "heads_per_rank": Fact(
            config.get_num_attention_heads(parallel), f"tensor parallel size {ranks}"
        ),
        "kv_heads": Fact(config.get_total_num_kv_heads(), read),
        "layers": Fact(config.model_arch_config.total_num_hidden_layers, read),
        "experts": Fact(config.get_num_experts(), read),
        "max_model_len": option("max_model_len", config.max_model_len, read),
        "dtype": option(
            "dtype", str(config.dtype).removeprefix("torch."), f"dtype in {read}"
        ),
        "quantization": option(
            "quantization",
            config.quantization,
            f"quantization_config in {read}" if config.quantization else "none given",
        ),
        "kv_cache_dtype": option(
            "kv_cache_dtype", vllm_config.cache_config.cache_dtype, "vLLM's default"
        ),
    }
    return Model(arguments.model, facts)


def _config_source(arguments: argparse.Namespace, config: "ModelConfig") -> str:
    """Say where the configuration was read."""
    if arguments.hf_config_path:
        return f"config.json of {arguments.hf_config_path}"
    if config.model == arguments.tokenizer and config.hf_config_path is None:
        return f"config.json of {arguments.tokenizer}"
    path = Path(arguments.model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return path.name
    folder = path if path.is_dir() else path.parent
    if path.exists() and not (folder / "config.json").exists():
        return "the GGUF header"
    return "config.json"
