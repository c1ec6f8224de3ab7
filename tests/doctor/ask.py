"""Ask the doctor again and again in one process: only for a child, as the doctor changes vLLM for good.

    python -m tests.doctor.ask FUNCTION QUESTIONS.json ANSWERS.json

calls a function of this module with each of a list of keyword arguments.
"""

import functools
import gc
import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Answers in place of a backend's name.
NOTHING_FITS = "no backend fits"
REFUSED = "refused"


def clear_caches() -> None:
    """Forget what vLLM remembers of the previous GPU."""
    for cache in _caches(len(sys.modules)):
        cache.cache_clear()


@functools.lru_cache(maxsize=1)
def _caches(num_modules: int) -> list[Any]:
    """Return vLLM's caches. Looking at every object takes a third of a second: only after something was imported."""
    # Not isinstance(): it would load what lazy modules stand for.
    found = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    return [each for each in found if str(each.__module__).startswith("vllm.")]


def ask(*argv: str, sections: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what --json prints, and the text of the report as `text`.

    Of the sections below the backends those only: some take seconds. For a question that is not understood: `error`
    and `cure`.
    """
    from vllm.sm120.doctor import arguments, diagnosis
    from vllm.sm120.doctor.facts import DoctorError

    clear_caches()
    try:
        with patch.object(diagnosis, "SECTIONS", sections):
            report = diagnosis.diagnose(arguments.parse(list(argv)))
    except DoctorError as error:
        return {"error": str(error), "cure": error.cure}
    return report.as_dict() | {"text": report.as_text()}


def ask_without_flashinfer(*argv: str) -> dict[str, Any]:
    """Ask with a FlashInfer that lacks the sparse MLA decode API, which SM120 needs."""
    import vllm.utils.flashinfer

    with patch.object(vllm.utils.flashinfer, "has_flashinfer_sparse_mla_sm120", lambda: False):
        return ask(*argv)


def ask_elsewhere(*argv: str, environment: dict[str, str]) -> dict[str, Any]:
    """Ask on a host with these environment variables and without FlashInfer."""
    find_spec = importlib.util.find_spec

    def find_others(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] == "flashinfer" else find_spec(name, package)

    with patch.dict(os.environ, environment, clear=True), patch.object(importlib.util, "find_spec", find_others):
        return ask(*argv, sections=("indexer",))


def choice(argv: list[str]) -> str:
    """Return the backend that the doctor says, or NOTHING_FITS, or that vLLM refuses the configuration."""
    answer = ask(*argv)
    assert "error" not in answer, answer
    refused = (answer["reason"] or "").startswith("vLLM refuses")
    return answer["chosen"] or (REFUSED if refused else NOTHING_FITS)


def choice_of_vllm(layer: dict[str, Any], capability: str, options: dict[str, Any]) -> str:
    """Return the same of vLLM itself, on the GPU that it sees, which must say that it has this capability.

    `layer` is as for `select`, `options` are those of EngineArgs.
    """
    import vllm.model_executor.models.registry as registry
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import get_attn_backend

    # Else it imports all of vLLM in a child of its own for every architecture.
    registry._run_in_subprocess = lambda function: function()
    clear_caches()
    found = current_platform.get_device_capability().as_version_str()
    assert found == capability, f"vLLM sees a GPU of {found}, expected {capability}"
    try:
        config = EngineArgs(**options, skip_tokenizer_init=True).create_engine_config()
    except ValueError as error:
        print(f"{capability} {options}: {error}")
        return REFUSED
    with set_current_vllm_config(config):
        try:
            backend = get_attn_backend(
                dtype=config.model_config.dtype, kv_cache_dtype=config.cache_config.cache_dtype, **layer
            )
        except ValueError as error:
            if not str(error).startswith("No valid attention backend"):
                raise
            return NOTHING_FITS
    return backend.get_name()


def select(layer: dict[str, Any], *argv: str) -> str:
    """Return what an attention layer of a model gets from vLLM's selector: a backend's name, or the error.

    `layer` is what the layer tells vLLM, by the parameters of `get_attn_backend`.
    """
    from vllm.config import set_current_vllm_config
    from vllm.sm120.doctor import arguments, gpus, host, model
    from vllm.v1.attention.selector import get_attn_backend

    clear_caches()
    options = arguments.parse(list(argv))
    host.pretend(gpus.find(options))
    config, _ = model.configure(model.locate(options), options)
    with set_current_vllm_config(config):
        try:
            backend = get_attn_backend(
                dtype=config.model_config.dtype, kv_cache_dtype=config.cache_config.cache_dtype, **layer
            )
        except ValueError as error:
            return str(error)
    return backend.get_name()


def main() -> None:
    function, questions, answers = sys.argv[1:]
    asked = json.loads(Path(questions).read_text())
    Path(answers).write_text(json.dumps([globals()[function](**each) for each in asked]))


if __name__ == "__main__":
    main()
