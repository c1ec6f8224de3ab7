"""Ask the doctor again and again in one process: only for a child, as the doctor changes vLLM for good."""

import functools
import gc
from typing import Any
from unittest.mock import patch


def clear_caches() -> None:
    """Forget what vLLM remembers of the previous GPU."""
    for candidate in gc.get_objects():
        # Not isinstance(): it would load what lazy modules stand for.
        if type(candidate) is functools._lru_cache_wrapper and str(candidate.__module__).startswith("vllm."):
            candidate.cache_clear()


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
