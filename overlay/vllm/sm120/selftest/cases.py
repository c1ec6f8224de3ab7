# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A case: one thing to check, what came out, and running it so that others go on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm.sm120.selftest.reference import WrongError
from vllm.sm120.selftest.report import FAILED, PASSED, SKIPPED, Check


@dataclass(frozen=True)
class Target:
    """The GPU that kernels are launched for."""

    capability: tuple[int, int]
    num_sms: int
    device: str = "cuda"


@dataclass(frozen=True)
class Case:
    stage: str
    name: str
    run: Callable[[], float]  # returns the error; raises WrongError or SkippedError
    limit: float
    shape: Any = None  # of an attention launch, so that it can be compiled ahead


class SkippedError(Exception):
    """The case cannot be run here; says what is missing."""


def run(case: Case) -> Check:
    """Run a case; whatever it raises is its result."""

    def check(status: str, value: float | None = None, detail: str = "") -> Check:
        return Check(case.stage, case.name, status, value, case.limit, detail)

    try:
        error = case.run()
    except SkippedError as reason:
        return check(SKIPPED, detail=str(reason))
    except torch.OutOfMemoryError:
        return check(SKIPPED, detail="out of GPU memory")
    except WrongError as problem:
        return check(FAILED, detail=str(problem))
    except Exception as error:  # a kernel that does not compile or launch
        first_line = (str(error).splitlines() or [""])[0]
        return check(FAILED, detail=f"{type(error).__name__}: {first_line}")
    return check(PASSED if error <= case.limit else FAILED, error)


def need_memory(num_bytes: int) -> None:
    """Skip the case unless so many bytes, and 1 GiB for others, are free on the GPU."""
    free = torch.cuda.mem_get_info()[0]
    if free < num_bytes + 2**30:
        raise SkippedError(
            f"needs {num_bytes / 2**30:.1f} GiB of GPU memory and 1 GiB to spare, "
            f"{free / 2**30:.1f} GiB are free"
        )
