"""Files on disk: whole or not at all, and one writer at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
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
    with (
        writable(target),
        tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file,
    ):
        temporary = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), target.stat().st_mode if target.exists() else 0o666 & ~_umask())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
    """A temporary folder inside `folder`, removed at the end whatever happens."""
    with writable(folder / prefix):
        path = Path(tempfile.mkdtemp(dir=folder, prefix=prefix))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
