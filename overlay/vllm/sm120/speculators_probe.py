# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The config that the speculators probe reads, for models that may have none."""

from typing import Any

from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig

from vllm.logger import init_logger

logger = init_logger(__name__)


def get_config_dict(source: str, **kwargs: Any) -> dict[str, Any]:
    """Return the config of `source`, or an empty dict where it has none.

    A name that is neither a path nor a repo id (`org/name:Q4_K_M`) has no config of
    its own: whoever understands that name finds one later, and `ModelConfig`
    reports it if nobody does. Every other failure is a real one and is raised.

    Args:
        source: Model name or path, or the value of `--hf-config-path`
        **kwargs: Passed to `PreTrainedConfig.get_config_dict`

    """
    reason = "it has no config.json"
    try:
        config_dict, _ = PreTrainedConfig.get_config_dict(source, **kwargs)
    except OSError as e:
        if not isinstance(e.__cause__, HFValidationError):
            raise
        config_dict, reason = {}, str(e)
    if not config_dict:
        logger.info("No speculators config for %s: %s", source, reason)
    return config_dict
