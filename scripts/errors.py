"""Failures that the user can act on. Each class has an exit code of its own.

A message names the file or the thing at fault and what was expected; `cure` says what to do.
The command line prints both, without a traceback, and exits with the class's code.
"""

from __future__ import annotations

from typing import ClassVar


class FatalError(Exception):
    """Base class; never raised itself."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, cure: str = "") -> None:
        super().__init__(message)
        self.cure = cure


class PinError(FatalError):
    """upstream.toml is missing, malformed or contradicts itself."""

    exit_code = 10


class SourceError(FatalError):
    """An upstream file cannot be had: not cached, and no index has or answers for it."""

    exit_code = 11


class HashError(FatalError):
    """A file's content is not what the pin says."""

    exit_code = 12


class StorageError(FatalError):
    """The cache or the build folder cannot be written: disk full, read-only, no permission."""

    exit_code = 13


class GitError(FatalError):
    """Git failed where no failure was expected: a defect, a broken repository or a full disk."""

    exit_code = 14


class SeriesError(FatalError):
    """A patch file, the series file or the overlay breaks a rule of this repository."""

    exit_code = 20


class ApplyError(FatalError):
    """A patch of the series does not apply to the pinned upstream."""

    exit_code = 21


class UnsavedWorkError(FatalError):
    """Going on would throw away work that exists nowhere else."""

    exit_code = 22


class EditError(FatalError):
    """An edit cannot be started, continued or folded in."""

    exit_code = 23


class LintError(FatalError):
    """`check` found problems."""

    exit_code = 24


class RebaseError(FatalError):
    """A rebase cannot be started, or has stopped at something that the user has to decide."""

    exit_code = 25


class DriftError(FatalError):
    """A rebase to one of the releases that were looked at would not be clean."""

    exit_code = 26


class PrefixError(FatalError):
    """A prefix of the series does not work, or none can be tried."""

    exit_code = 27


class BisectError(FatalError):
    """No part of the distribution can be named for what a command does."""

    exit_code = 28


class RevisionError(FatalError):
    """A state of this repository is asked for that it does not have."""

    exit_code = 29


class WheelError(FatalError):
    """A wheel cannot be assembled from these inputs."""

    exit_code = 30


class ReleaseError(FatalError):
    """The content of a wheel changed but its version did not."""

    exit_code = 31


class VerifyError(FatalError):
    """A finished wheel is not what this repository says it should be."""

    exit_code = 32
