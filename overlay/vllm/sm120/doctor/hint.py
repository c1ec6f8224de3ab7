# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The line that an error of the selector gains: the doctor's command for it."""

from vllm.platforms.interface import DeviceCapability
from vllm.sm120.doctor.arguments import command


def hint(capability: DeviceCapability) -> str:
    """Return the line, or nothing if no model is configured."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    model_config = getattr(config, "model_config", None)
    if getattr(model_config, "model", None) is None:
        return ""
    cache, parallel = config.cache_config, config.parallel_config
    gguf = model_config.quantization == "gguf"
    dcp = parallel.decode_context_parallel_size
    options = {
        "capability": capability.as_version_str(),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": cache.cache_dtype,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "decode_context_parallel_size": dcp if dcp > 1 else None,
        "quantization": model_config.quantization,
        "block_size": cache.block_size if cache.user_specified_block_size else None,
        # The GGUF plugin puts a temporary folder here.
        "hf_config_path": None if gguf else model_config.hf_config_path,
        "trust_remote_code": model_config.trust_remote_code,
    }
    model = model_config.model_weights or model_config.model
    return f"\nWhat would fit: {command('doctor', model, options)}"
