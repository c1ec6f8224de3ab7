# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names of GPUs, their compute capability and memory, and the GPU of this machine.

Capabilities are NVIDIA's (https://developer.nvidia.com/cuda-gpus). Memory is what
the driver reports of a board as sold, in GiB, rounded down.
"""

import argparse
import re

from vllm.sm120.doctor.facts import GIB, DoctorError, Gpu

_GPUS = {
    "RTX PRO 6000 Blackwell": ((12, 0), 95),
    "RTX PRO 5000 Blackwell": ((12, 0), 47),
    "RTX PRO 4500 Blackwell": ((12, 0), 31),
    "RTX PRO 4000 Blackwell": ((12, 0), 23),
    "RTX 5090": ((12, 0), 31),
    "RTX 5080": ((12, 0), 15),
    "RTX 5070 Ti": ((12, 0), 15),
    "RTX 5070": ((12, 0), 11),
    "RTX 5060 Ti": ((12, 0), 15),
    "GB10 (DGX Spark)": ((12, 1), 119),
    "B300": ((10, 3), 267),
    "GB300": ((10, 3), 267),
    "B200": ((10, 0), 179),
    "GB200": ((10, 0), 184),
    "H200": ((9, 0), 140),
    "GH200": ((9, 0), 95),
    "H100": ((9, 0), 79),
    "H20": ((9, 0), 95),
    "RTX 6000 Ada": ((8, 9), 47),
    "L40S": ((8, 9), 44),
    "L40": ((8, 9), 44),
    "L4": ((8, 9), 22),
    "RTX 4090": ((8, 9), 23),
    "RTX 4080": ((8, 9), 15),
    "RTX A6000": ((8, 6), 47),
    "RTX A5000": ((8, 6), 23),
    "A40": ((8, 6), 44),
    "A10": ((8, 6), 22),
    "A10G": ((8, 6), 22),
    "RTX 3090": ((8, 6), 24),
    "Jetson AGX Orin": ((8, 7), 61),
    "A100 80GB": ((8, 0), 80),
    "A100 40GB": ((8, 0), 40),
    "A30": ((8, 0), 24),
    "T4": ((7, 5), 15),
    "V100": ((7, 0), 31),
}


def find(arguments: argparse.Namespace) -> Gpu:
    """Return the GPU that the options ask about; without any, that of this machine.

    Raises:
        DoctorError: The name is unknown or not unique, or there is no GPU here.
    """
    memory = None if arguments.memory is None else int(arguments.memory * GIB)
    if arguments.capability:
        return Gpu("any NVIDIA GPU", arguments.capability, memory, "--capability")
    gpu = _local() if arguments.gpu is None else _by_name(arguments.gpu)
    return Gpu(gpu.name, gpu.capability, memory or gpu.memory, gpu.source)


def _by_name(wanted: str) -> Gpu:
    words = _words(wanted)
    found = [name for name in _GPUS if words and words <= _words(name)]
    exact = [name for name in found if words == _words(name)]
    if not found:  # the driver's names say more: NVIDIA A100-SXM4-80GB
        known = [name for name in _GPUS if _words(name) <= words]
        found = sorted(known, key=lambda name: len(_words(name)))[-1:]
    found = exact or found
    # Boards of one name that differ in memory alone answer the question as well.
    if len({_GPUS[name][0] for name in found}) != 1:
        choice = ", ".join(found or _GPUS)
        raise DoctorError(
            f"--gpu {wanted!r} names {len(found)} GPUs, expected one of: {choice}",
            "give its compute capability: --capability MAJOR.MINOR",
        )
    smallest = min(found, key=lambda name: _GPUS[name][1])
    capability, memory = _GPUS[smallest]
    return Gpu(smallest, capability, memory * GIB, "--gpu")


def _words(name: str) -> set[str]:
    """Return what tells one GPU from another in its name: RTX A6000 -> a, 6000."""
    words = re.findall(r"[a-z]+|\d+", name.lower())
    return set(words) - {"nvidia", "geforce", "rtx", "tesla", "dgx", "gpu"}


def _local() -> Gpu:
    """Ask the driver; NVML does not initialise CUDA."""
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            name = pynvml.nvmlDeviceGetName(handle)
            capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
            try:
                memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            except pynvml.NVMLError:  # memory shared with the CPU, as on GB10
                memory = None
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise DoctorError(
            f"this machine has no NVIDIA GPU to ask about ({error})",
            'name one: --gpu "RTX PRO 6000", or --capability 12.0',
        ) from error
    return Gpu(name, capability, memory, "the driver of this machine")
