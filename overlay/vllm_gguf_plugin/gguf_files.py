# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Find the files of a GGUF model, and see that they are one."""

import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

from vllm.logger import init_logger

from .gguf_header import GGUFFileError, Tensor, read_header, show

# vLLM shows what its own loggers say.
logger = init_logger(f"vllm.{__name__}")

# <owner>/<name>
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<no>\d+)-of-(?P<count>\d+)", re.DOTALL)
# Companions of a model, not models: a projector, statistics for quantisation.
_COMPANION = re.compile(r"mmproj|^imatrix|imatrix\.gguf$", re.IGNORECASE)
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth"}


@dataclass(frozen=True)
class GGUFModel:
    """What the headers of all files of a model say, validated."""

    files: list[Path]
    metadata: dict[str, Any]
    tensors: list[Tensor]


@dataclass
class _Candidate:
    """The files of one model in a listing: a single file or a set of shards."""

    stem: str
    """Path up to the shard number, as in the listing"""
    count: int
    """Number of shards that the names promise, 0 for a single file"""
    names: dict[int, str] = field(default_factory=dict)
    """Shard number, from 1, to name"""

    @property
    def label(self) -> str:
        return show(self.stem) + (f" in {self.count} shards" if self.count else "")

    def complete(self, where: str, others: Iterable["_Candidate"] = ()) -> list[str]:
        """Return all names in order."""
        wanted = range(1, (self.count or 1) + 1)
        if missing := [no for no in wanted if no not in self.names]:
            first = f"{self.stem}-{missing[0]:05d}-of-{self.count:05d}.gguf"
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            text = (
                f"{where}: of {self.count} shards only {len(self.names)} are there, "
                f"{show(first)}{more} missing. Download the missing shards into the "
                "same folder."
            )
            other = [c for c in others if c.stem == self.stem and c is not self]
            if other:
                text += (
                    f" The folder also has shards of another split, such as "
                    f"{show(next(iter(other[0].names.values())))}: all must come "
                    "from one."
                )
            raise GGUFFileError(text)
        return [self.names[no] for no in wanted]


def _candidates(names: Iterable[str]) -> list[_Candidate]:
    found: dict[tuple[str, int], _Candidate] = {}
    for name in sorted(names):
        base = Path(name).name
        if not base.endswith(".gguf") or _COMPANION.search(base):
            continue
        stem = name.removesuffix(".gguf")
        no = count = 0
        if (match := _SHARD.fullmatch(stem)) is not None:
            stem, no, count = match["stem"], int(match["no"]), int(match["count"])
        if not 1 <= no <= count <= 99999:
            stem, no, count = name.removesuffix(".gguf"), 1, 0
        candidate = found.setdefault((stem, count), _Candidate(stem, count))
        candidate.names.setdefault(no, name)
    return list(found.values())


def choose(names: Iterable[str], quant: str | None, where: str) -> list[str]:
    """Return those of `names` that make one model, in the order of the shards.

    Args:
        names: Paths of a listing, relative to `where`
        quant: The quant's name, in the file's name or that of its folder
            (`UD-Q2_K_XL`, in any case); None where there must be a single model
        where: What was listed, for messages

    """
    everything = _candidates(names)
    found = everything
    if quant is not None:
        part = re.compile(rf"(?:^|[-./_]){re.escape(quant)}(?=$|[-./])", re.IGNORECASE)
        found = [c for c in found if part.search(c.stem)]
        # Q4_K_M also ends UD-Q4_K_M: the plain one is meant where there are both.
        plain = [c for c in found if f"ud-{quant}".lower() not in c.stem.lower()]
        found = plain or found
        exact = [c for c in found if c.stem.lower().endswith(quant.lower())]
        found = exact or found
    if len(found) == 1:
        return found[0].complete(where, everything)
    listed = ", ".join(c.label for c in (found or everything)[:20])
    if found:
        raise GGUFFileError(
            f"{where} has the files of {len(found)} models"
            + (f" for {quant}" if quant else "")
            + f" ({listed}), and one is wanted. Give the path of one of them, or "
            "move the others away."
        )
    if everything:
        raise GGUFFileError(
            f"{where} has no GGUF file for {show(quant)}. It has: {listed}."
        )
    raise GGUFFileError(f"{where} has no GGUF file.")


def _listing(folder: Path, depth: int) -> list[str]:
    """Return the GGUF files in `folder` and `depth` levels below, relative to it."""
    names: list[str] = []
    try:
        for entry in sorted(folder.iterdir()):
            if entry.name.endswith(".gguf") and entry.is_file():
                names.append(entry.name)
            elif depth and entry.is_dir() and os.access(entry, os.R_OK | os.X_OK):
                below = _listing(entry, depth - 1)
                names.extend(f"{entry.name}/{name}" for name in below)
    except OSError as e:
        raise GGUFFileError(f"{show(folder)} cannot be read: {e.strerror}.") from e
    return names


def is_model_folder(path: str | os.PathLike) -> bool:
    """Return whether a folder has a model's weights in GGUF, and in nothing else."""
    folder = Path(path)
    try:
        if not folder.is_dir():
            return False
        if any(entry.suffix in _OTHER_WEIGHTS for entry in folder.iterdir()):
            return False
        if not _candidates(_listing(folder, depth=1)):
            return False
        # vLLM itself has one model class that reads a folder with a GGUF file.
        config = folder / "config.json"
        return not (config.is_file() and b'"flint"' in config.read_bytes())
    except (OSError, GGUFFileError):
        return False


def find_files(
    model: str | os.PathLike,
    revision: str | None = None,
    cache_dir: str | None = None,
) -> list[Path]:
    """Return the files of a model, in the order of the shards.

    Args:
        model: A file (any shard), a folder with the files of one model in it or one
            level below, or such a folder or a repository on the Hub with the quant's
            name, `<folder>:<quant>` and `<owner>/<name>:<quant>`
        revision: Of the repository
        cache_dir: Of the Hub's files, if not the usual one

    """
    text = os.fspath(model)
    path = Path(text)
    if path.is_dir():
        names = _listing(path, depth=0) or _listing(path, depth=1)
        return [path / name for name in choose(names, None, f"Folder {show(text)}")]
    if path.is_file():
        if _SHARD.fullmatch(path.name.removesuffix(".gguf")) is None:
            return [path]
        candidates = _candidates(_listing(path.parent, depth=0))
        mine = [c for c in candidates if path.name in c.names.values()]
        if not mine:  # a companion
            return [path]
        where = f"Folder {show(path.parent)}"
        return [path.parent / name for name in mine[0].complete(where, candidates)]
    base, colon, quant = text.rpartition(":")
    if colon and Path(base).is_dir():
        names = choose(_listing(Path(base), depth=1), quant, f"Folder {show(base)}")
        return [Path(base) / name for name in names]
    if colon and _REPOSITORY.fullmatch(base):
        return _find_on_hub(base, quant, revision, cache_dir)
    if path.exists():
        raise GGUFFileError(f"{show(text)} is neither a file nor a folder.")
    raise GGUFFileError(
        f"{show(text)} does not exist. Give a GGUF file, a folder, <folder>:<quant> "
        "or <owner>/<repository>:<quant>."
    )


def _find_on_hub(
    repo: str, quant: str, revision: str | None, cache_dir: str | None
) -> list[Path]:
    """Return the files of a quant from the Hub's cache, downloaded if not offline."""
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        names = choose(_repository(repo, revision), quant, f"Repository {repo}")
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=[glob.escape(name) for name in names],
        )
        return [Path(folder) / name for name in names]
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except LocalEntryNotFoundError as e:
        raise GGUFFileError(
            f"{repo} is not in the Hub's cache, and HF_HUB_OFFLINE is set. Download "
            f"{quant} first, or give the path of its files."
        ) from e
    names = _listing(Path(folder), depth=2)
    where = f"The cached copy of {repo} ({folder})"
    return [Path(folder) / name for name in choose(names, quant, where)]


def _repository(repo: str, revision: str | None) -> list[str]:
    return huggingface_hub.HfApi().list_repo_files(repo, revision=revision)


def resolve(
    model: str, revision: str | None = None, cache_dir: str | None = None
) -> str:
    """Return the first file of a model, or `model` where only its loader can tell.

    What is on this machine is resolved and complete, what is sharded on the Hub is
    downloaded first: its configuration is in its first shard. A single file on the
    Hub is left to the loader, as is `<owner>/<name>/<file>.gguf`.
    """
    base, colon, quant = model.rpartition(":")
    remote = colon and not Path(model).exists() and not Path(base).exists()
    if remote and _REPOSITORY.fullmatch(base):
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            try:
                names = _repository(base, revision)
            except (OSError, httpx.HTTPError) as e:  # whoever needs a file reports it
                logger.debug("The files of %s cannot be listed: %s", base, e)
                return model
            if len(choose(names, quant, f"Repository {base}")) == 1:
                return model
    elif not Path(model).exists() and _REPOSITORY.fullmatch(
        Path(model).parent.as_posix()
    ):
        return model
    return str(find_files(model, revision, cache_dir)[0])


def nearest(path: str | os.PathLike, *names: str) -> Path | None:
    """Return the folder that has one of `names`, beside a GGUF file or above it.

    A repository keeps config.json and the tokenizer at its root and the files of a
    quant in a folder of that quant's name. Only such a folder is left upwards.
    """
    folder = Path(path).absolute().parent
    folders = [folder]
    if folder.name.lower() in Path(path).name.lower():
        folders.append(folder.parent)
    for folder in folders:
        if any((folder / name).is_file() for name in names):
            return folder
    return None


def read_headers(paths: Iterable[str | os.PathLike]) -> GGUFModel:
    """Return what the files of one model say, in the order of the shards.

    The metadata is the first file's: the other shards have nothing but their place
    (`split.*`), and the first may have no tensors.
    """
    files = [Path(path) for path in paths]
    metadata: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for no, path in enumerate(files):
        own, entries = read_header(path)
        count = own.get("split.count", 1) or 1
        if count != len(files):
            raise GGUFFileError(
                f"{show(path)} is one of {count} shards (split.count), and "
                f"{len(files)} are given. Put all shards of one model, under the names "
                "that they were published with, into one folder."
            )
        if len(files) > 1 and own.get("split.no") != no:
            raise GGUFFileError(
                f"{show(path)} is shard {own.get('split.no')!r} (split.no, from 0) by "
                f"its content and {no} by its name. Download it again."
            )
        if no == 0:
            metadata = own
        for key in ("general.architecture", "split.tensors.count"):
            if key in own and own[key] != metadata.get(key):
                raise GGUFFileError(
                    f"{key} is {metadata.get(key)!r} in {show(files[0])} and "
                    f"{own[key]!r} in {show(path)}: the shards of different models "
                    "are mixed. Download all shards of one."
                )
        for tensor in entries:
            if tensor.name in tensors:
                raise GGUFFileError(
                    f"tensor {show(tensor.name)} is in {show(path)} and in "
                    f"{show(tensors[tensor.name].file)}: the shards of different "
                    "models are mixed. Download all shards of one."
                )
            tensors[tensor.name] = tensor
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise GGUFFileError(
            f"{show(files[0])} announces {expected} tensors (split.tensors.count), "
            f"and its {len(files)} files have {len(tensors)}: the shards of different "
            "models are mixed. Download all shards of one."
        )
    return GGUFModel(files, metadata, list(tensors.values()))
