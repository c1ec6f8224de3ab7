"""One patch file: a git format-patch mail with a header that says why it exists."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchedFile, PatchSet

from scripts.errors import SeriesError
from scripts.repository import Author, Repository
from scripts.sources import is_native

#: Yocto's words for what upstream knows of a patch.
UPSTREAM_STATUS = ("Pending", "Submitted", "Denied", "Inappropriate", "Backport", "Inactive-Upstream")
#: Added to a commit's message so that the file name survives a rebase; no patch file carries it.
FILENAME_TRAILER = "Patch-Filename"

_REQUIRED = ("Upstream-Status", "Remove-When", "Scope")
_SCOPES = ("python", "native")


@dataclass(frozen=True)
class Patch:
    """A patch file, read and taken apart."""

    path: Path
    text: bytes
    author: Author
    subject: str
    body: str
    trailers: Mapping[str, str]
    diff: bytes

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text).hexdigest()

    @property
    def message(self) -> str:
        """The commit message: the mail's, and the file name as a trailer."""
        separator = "\n" if self.trailers else "\n\n"
        text = f"{self.subject}\n\n{self.body}".strip("\n")
        return f"{text}{separator}{FILENAME_TRAILER}: {self.name}\n"

    @cached_property
    def files(self) -> list[PatchedFile]:
        """The files that the diff changes."""
        return list(PatchSet.from_string(self.diff.decode("utf-8", "surrogateescape")))

    def native(self, package: str) -> list[str]:
        """The files touched that only a compiler can turn into a wheel."""
        return [file.path for file in self.files if is_native(file.path, package)]


def load(repository: Repository, path: Path) -> Patch:
    """Read a patch file.

    Raises:
        SeriesError: it cannot be read, or `parse` refuses it.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SeriesError(
            f"{path}: cannot be read: {error.strerror}", cure="restore it, or take it out of the series"
        ) from None
    return parse(repository, path, text)


def parse(repository: Repository, path: Path, text: bytes) -> Patch:
    """Take apart the text of the patch file `path`, which need not be there yet.

    Raises:
        SeriesError: it is empty, not a format-patch mail, binary, adds files, was mangled or leads out of the tree.
    """

    def refuse(problem: str, cure: str = "export it anew with `make export`") -> SeriesError:
        return SeriesError(f"{path}: {problem}", cure=cure)

    if not text.strip():
        raise refuse("empty", "restore it, or take it out of the series")
    # git's own export with --no-stat puts the diff right after the message, without a line of dashes.
    header, separator, _ = text.partition(b"\ndiff --git ")
    if b"\r\n" in header or re.search(rb"^diff --git .*\r$", text, re.MULTILINE):
        raise refuse("has CRLF line ends", "restore it: an editor or a mail program converted it")
    if re.search(rb"^(GIT binary patch|Binary files .* differ)\r?$", text, re.MULTILINE):
        raise refuse("changes a binary file", "a patch changes text; put new files into overlay/")
    mail = repository.mailinfo(text) if text.startswith(b"From ") and separator else None
    if mail is None or not mail.diff.strip():
        raise refuse("not a git format-patch mail with a diff")
    lines = re.findall(rb"^.*$", header, re.MULTILINE)
    if any(line.startswith((b"---", b"diff ", b"Index: ")) for line in lines):
        raise refuse("a line of the message begins like a diff; `git am` would drop what follows", "reword it")
    trailers = repository.trailers(f"{mail.subject}\n\n{mail.body}")
    patch = Patch(path, text, mail.author, mail.subject, mail.body, trailers, mail.diff)
    try:
        files = patch.files
    except (UnidiffParseError, ValueError) as error:
        raise refuse(f"malformed diff: {error}") from None
    if not files:
        raise refuse("its diff changes no file")
    for file in files:
        for name in sorted({file.source_file, file.target_file} - {"/dev/null"}):
            parts = PurePosixPath(name[2:]).parts
            if not name.startswith(("a/", "b/")) or ".." in parts or ".git" in parts or not parts or name[2] == "/":
                raise refuse(f"{name} leads out of the tree", "a patch changes upstream's own files only")
        if not len(file):
            raise refuse(f"changes no line of {file.path}", "a patch changes text, not modes and names")
        if file.is_added_file:
            raise refuse(f"adds {file.path}", "put new files into overlay/; a patch holds the hook that calls them")
    return patch


def header_problems(patch: Patch, root: Path, package: str) -> list[str]:
    """What is missing or wrong in a patch's header, as sentences that begin with the file name."""
    problems = []
    trailers = patch.trailers
    paragraphs = [text for text in patch.body.strip().split("\n\n") if text]
    if len(paragraphs) <= bool(trailers):
        problems.append("the message does not say why the patch exists")
    problems += [f"trailer {name} is missing" for name in _REQUIRED if not trailers.get(name)]
    status = trailers.get("Upstream-Status", "")
    if status and status not in UPSTREAM_STATUS:
        problems.append(f"Upstream-Status {status!r} is none of {', '.join(UPSTREAM_STATUS)}")
    if status in ("Submitted", "Backport") and "https://" not in trailers.get("Upstream-Link", ""):
        problems.append(f"Upstream-Status {status} needs an Upstream-Link")
    scope = trailers.get("Scope", "")
    if scope and scope not in _SCOPES:
        problems.append(f"Scope {scope!r} is none of {', '.join(_SCOPES)}")
    if scope == "python" and (native := patch.native(package)):
        problems.append(f"Scope is python, yet it changes {', '.join(native)}")
    missing = [test for test in trailers.get("Tests", "").split() if not (root / test).exists()]
    problems += [f"Tests names {test}, which does not exist" for test in missing]
    if FILENAME_TRAILER in trailers:
        problems.append(f"trailer {FILENAME_TRAILER} does not belong into the file")
    return [f"{patch.path}: {problem}" for problem in problems]
