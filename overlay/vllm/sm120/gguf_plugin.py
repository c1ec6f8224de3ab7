# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether the installed vllm-gguf-plugin is this distribution's own."""

import importlib.metadata

from packaging.version import Version

from vllm.logger import init_logger
from vllm.sm120 import ProvenanceError, plugin_provenance

logger = init_logger(__name__)

# What makes more than one GPU right. Upstream has it in what follows this release.
_FIX = "tensor-parallel-rank.patch"
_LAST_WITHOUT_FIX = Version("0.0.5")


def check_gguf_plugin(tensor_parallel_size: int) -> None:
    """Warn of a plugin that is not patched, and refuse what it would corrupt.

    Raises:
        ValueError: Each rank would load rank 0's part of the weights.

    """
    try:
        provenance = plugin_provenance()
        if provenance is None:  # whoever registered "gguf" is another plugin
            return
        patches = provenance["patches"]
    except ProvenanceError:
        patches = []
    if any(patch["name"] == _FIX for patch in patches):
        return

    version = importlib.metadata.version("vllm-gguf-plugin")
    vllm_version = importlib.metadata.version("vllm")
    problem = (
        f"vllm-gguf-plugin {version} is not the one that this vLLM, {vllm_version}, "
        "was built with"
    )
    cure = f"install `vllm[gguf]=={vllm_version}` with pip's --find-links DIST"
    corrupts = Version(Version(version).public) <= _LAST_WITHOUT_FIX
    if corrupts and tensor_parallel_size > 1:
        raise ValueError(
            f"{problem}: with --tensor-parallel-size {tensor_parallel_size} it loads "
            "the first GPU's part of fused layers on every GPU, and the text would be "
            f"wrong. Use one GPU, or {cure}."
        )
    logger.warning_once(
        "%s: GLM-5 and DeepSeek-V3.2 will not load, and known faults of the plugin "
        "are not fixed. To be sure, %s.",
        problem,
        cure,
    )
