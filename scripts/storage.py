"""Files on disk: whole or not at all, and one writer at a time."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from scripts.console import console
from scripts.errors import StorageError


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn the failures of a full or read-only disk into an error that names `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror or error}",
            cure="free some space or mend its permissions; VLLM_SM120_CACHE moves the cache elsewhere",
        ) from None


def replace(finished: Path, target: Path) -> None:
    """Give a finished file its name."""
    with writable(target):
        finished.replace(target)


def write(target: Path, data: bytes) -> None:
    """Write a file through a temporary name, so that it is never half there."""
    temporary = target.with_name(f".{target.name}.tmp")  # always this one: what a killed run left is overwritten
    with writable(target):
        try:
            temporary.write_bytes(data)
            if target.exists():
                temporary.chmod(target.stat().st_mode)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file; a second run says that it waits, then goes on when the first is done."""
    lock = filelock.FileLock(path)
    with writable(path):
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            console.print(f"another run holds {path}, waiting for it")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def scratch(folder: Path, prefix: str) -> Iterator[Path]:
    """A temporary folder inside `folder`, removed at the end whatever happens; what killed runs left goes first.

    A lock file beside it says that the folder is in use: a lock ends with its process.
    """
    path = folder / f"{prefix}{secrets.token_hex(4)}"
    lock = filelock.FileLock(f"{path}.lock")
    with writable(path):
        for left in folder.glob(f".*-{'?' * 8}.lock"):
            _remove_abandoned(left)
        lock.acquire()
        path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return
    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    lock.release()
    path.unlink(missing_ok=True)


def discard(path: Path, folder: Path) -> None:
    """Remove a folder, through a temporary name inside `folder` so that it is never half there."""
    with scratch(folder, ".discarded-") as temporary:
        replace(path, temporary / path.name)
