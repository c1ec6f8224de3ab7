"""What became of a patch when it met a tree, and, where it failed, both sides of the place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from unidiff.patch import Hunk, PatchedFile

from scripts.patch import Patch
from scripts.repository import Output, Repository


class Kind(StrEnum):
    """The verdicts. Only the first two let a build go on."""

    EXACT = "exact"
    OFFSET = "offset"
    MERGED = "merged-3way"
    CONFLICT = "conflict"
    UPSTREAMED = "upstreamed"
    PARTLY = "partly-upstreamed"
    FILE_GONE = "file-gone"
    NATIVE = "native-in-wheel-mode"


@dataclass(frozen=True)
class Verdict:
    """A verdict with what it concerns: the largest offset, the files or the hunks."""

    kind: Kind
    subject: str = ""
    explanation: str = ""

    @property
    def good(self) -> bool:
        return self.kind in (Kind.EXACT, Kind.OFFSET)

    def __str__(self) -> str:
        return f"{self.kind}({self.subject})" if self.subject else str(self.kind)


def judge(repository: Repository, index: Path, patch: Patch, package: str) -> Verdict:
    """Apply a patch to an index and say what happened.

    The index holds the patched tree afterwards where the verdict is exact, offset or merged-3way, and is
    as before otherwise.
    """
    if native := patch.native(package):
        return Verdict(
            Kind.NATIVE, ", ".join(native), "a wheel made from upstream's binaries cannot contain this change"
        )
    result = repository.apply(patch.diff, index)
    if result:
        offsets = [abs(int(number)) for number in re.findall(r"\(offset (-?\d+) lines?\)", result.stderr)]
        return Verdict(Kind.OFFSET, str(max(offsets))) if offsets else Verdict(Kind.EXACT)
    tree = repository.write_tree(index)
    entries = repository.files(tree, *{file.path for file in patch.files})
    contents = dict(zip(entries, repository.blobs([entry.blob for entry in entries.values()]), strict=True))
    gone = [file.path for file in patch.files if file.path not in contents]
    if gone:
        return Verdict(Kind.FILE_GONE, ", ".join(gone), "upstream's sources have no such file at this version")
    if repository.apply(patch.diff, index, reverse=True, check=True):
        return Verdict(Kind.UPSTREAMED, "", "upstream already contains the whole change")
    taken = [
        f"{file.path} hunk {number}"
        for file in patch.files
        for number, hunk in enumerate(file, 1)
        if _may_be_in(hunk, contents[file.path])
        and repository.apply(_alone(file, hunk), index, reverse=True, check=True)
    ]
    explanation = _both_sides(contents, patch, result)
    if taken:
        return Verdict(Kind.PARTLY, ", ".join(taken), explanation)
    if repository.apply(patch.diff, index, three_way=True):
        return Verdict(Kind.MERGED, "", explanation)
    conflicts = _unmerged(repository, index) or [file.path for file in patch.files]
    repository.read_tree(index, tree)
    return Verdict(Kind.CONFLICT, ", ".join(conflicts), explanation)


def _unmerged(repository: Repository, index: Path) -> list[str]:
    listing = repository.run("ls-files", "--unmerged", "-z", index=index).decode(errors="surrogateescape")
    return sorted({record.split("\t", 1)[1] for record in listing.split("\0")[:-1]})


def _alone(file: PatchedFile, hunk: Hunk) -> bytes:
    return f"--- {file.source_file}\n+++ {file.target_file}\n{hunk}".encode("utf-8", "surrogateescape")


def _may_be_in(hunk: Hunk, content: bytes) -> bool:
    """Whether the lines that a hunk leaves stand in a file; only then is git worth asking, which takes far longer."""
    lines = "".join(line.value for line in hunk.target_lines()).encode("utf-8", "surrogateescape")
    return lines.replace(b"\r", b"").rstrip(b"\n") in content.replace(b"\r", b"")


def _both_sides(contents: Mapping[str, bytes], patch: Patch, result: Output) -> str:
    """For each hunk that git names: what the patch expects and what the tree has at the likeliest place."""
    parts = []
    for path, line in re.findall(r"^error: patch failed: (.+):(\d+)$", result.stderr, re.MULTILINE):
        for file in patch.files:
            for number, hunk in enumerate(file, 1):
                if file.path != path or hunk.source_start != int(line):
                    continue
                content = contents[path].decode("utf-8", "replace").splitlines()
                expected = [text.value.rstrip("\r\n") for text in hunk.source_lines()]
                start = _likeliest(content, expected, hunk.source_start - 1)
                found = content[start : start + len(expected)]
                parts += [
                    f"{path}, hunk {number} of {len(file)}",
                    f"  the patch expects, at line {hunk.source_start}:",
                    *(f"    {text}" for text in expected),
                    f"  the tree has, at line {start + 1}:",
                    *(f"  {' ' if text in expected else '!'} {text}" for text in found),
                ]
    return "\n".join(parts) or result.stderr.strip()


def _likeliest(content: Sequence[str], expected: Sequence[str], near: int) -> int:
    """Where in `content` most lines of `expected` stand in place; the nearest to `near` if several are alike."""

    def rank(start: int) -> tuple[int, int]:
        window = content[start : start + len(expected)]
        return sum(a == b for a, b in zip(window, expected, strict=False)), -abs(start - near)

    return max(range(max(1, len(content) - len(expected) + 1)), key=rank)
