"""What upstream did, between two releases, to the places that a patch changes: in words."""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unidiff.patch import PatchedFile

from scripts.repository import Repository

#: How much of a text has to be found elsewhere for it to count as moved there.
_ALIKE = 0.5


@dataclass(frozen=True)
class Release:
    """An upstream release: what it is called, and its commit."""

    tag: str
    commit: str


def describe(
    repository: Repository, old: Release, new: Release, between: Sequence[Release], file: PatchedFile
) -> list[str]:
    """Sentences on what became of one file of a patch that was made for `old`.

    `between` are the releases after `old` and before `new` that are at hand, in this order.
    """
    path = file.path
    before, after = repository.read(old.commit, path), repository.read(new.commit, path)
    if before is None:
        return [f"{path} is not in {old.tag} either"]
    names = _touched(_text(before), file)
    if after is None:
        return [_gone(repository, old, new, between, path), *_moved(repository, old, new, path, names)]
    theirs, ours = _definitions(_text(before)), _definitions(_text(after))
    sentences = []
    for name in names:
        if name not in ours:
            sentences += _moved(repository, old, new, path, [name])
        elif theirs[name] != ours[name]:
            sentences.append(f"{path}: {name} changed ({_size(theirs[name], ours[name])})")
    if not sentences and before != after:
        sentences.append(f"{path} changed ({_size(_text(before), _text(after))}), not in what the patch changes")
    return sentences


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _size(old: str, new: str) -> str:
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm=""))[2:]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"+{added} -{removed} lines"


# -- functions and classes ---------------------------------------------------------------------------


def _nodes(text: str) -> dict[str, ast.AST]:
    """Functions and classes by their qualified name; none where the text is not Python."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, ast.AST] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[prefix + child.name] = child
                inner = f"{prefix}{child.name}."
            visit(child, inner)

    visit(module, "")
    return found


def _span(node: ast.AST) -> range:
    """The lines of a definition, decorators included, counted from 1."""
    decorators = getattr(node, "decorator_list", [])
    start = min([node.lineno, *(one.lineno for one in decorators)])  # type: ignore[attr-defined]
    return range(start, node.end_lineno + 1)  # type: ignore[attr-defined]


def _definitions(text: str) -> dict[str, str]:
    lines = text.splitlines()
    return {
        name: "\n".join(lines[number - 1] for number in _span(node) if number <= len(lines))
        for name, node in _nodes(text).items()
    }


def _touched(text: str, file: PatchedFile) -> list[str]:
    """The innermost definitions that the changed lines of a patch are in."""
    spans = {name: _span(node) for name, node in _nodes(text).items()}
    found = []
    for number in _changed_lines(file):
        inside = [name for name, span in spans.items() if number in span]
        if inside and (innermost := max(inside, key=lambda name: name.count("."))) not in found:
            found.append(innermost)
    return found


def _changed_lines(file: PatchedFile) -> Iterable[int]:
    """Where the patch changes something, in lines of the old file."""
    for hunk in file:
        position = hunk.source_start
        for line in hunk:
            if not line.is_context:
                yield position
            if not line.is_added:
                position += 1


def _moved(repository: Repository, old: Release, new: Release, path: str, names: Sequence[str]) -> list[str]:
    """What became of definitions that a file has no more."""
    theirs = _definitions(_text(repository.read(old.commit, path) or b""))
    return [f"{path}: {name} {_where(repository, old, new, path, name, theirs[name])}" for name in names]


def _where(repository: Repository, old: Release, new: Release, path: str, name: str, text: str) -> str:
    """Where a definition went: one of the same name in another file, or of another in its own, that is new there."""
    short = name.rsplit(".", 1)[-1]
    places = []
    for other in {path, *_files_with(repository, new.commit, short)}:
        known, found = (_definitions(_text(repository.read(one.commit, other) or b"")) for one in (old, new))
        for place in found.keys() - known.keys():
            if other == path:
                places.append((_likeness(text, found[place]), f"is {place} now"))
            elif place.rsplit(".", 1)[-1] == short:
                as_what = f" as {place}" if place != name else ""
                places.append((_likeness(text, found[place]), f"moved to {other}{as_what}"))
    likeness, words = max(places, default=(0.0, ""))
    return words if likeness >= _ALIKE else "is gone"


def _files_with(repository: Repository, commit: str, name: str) -> list[str]:
    """The Python files that define `name`."""
    pattern = rf"^[[:space:]]*(async def|def|class)[[:space:]]+{name}[^A-Za-z0-9_]"
    output = repository.attempt("grep", "-l", "-z", "-E", "-e", pattern, commit, "--", "*.py")
    listing = output.stdout.decode(errors="surrogateescape").split("\0")[:-1]
    return [record.split(":", 1)[1] for record in listing]


def _likeness(old: str, new: str) -> float:
    """How much two texts have in common, line by line, whatever the indentation; 0 to 1."""
    first, second = ([line.strip() for line in text.splitlines()] for text in (old, new))
    return difflib.SequenceMatcher(None, first, second, autojunk=False).ratio()


# -- files -------------------------------------------------------------------------------------------


def _gone(repository: Repository, old: Release, new: Release, between: Sequence[Release], path: str) -> str:
    """Since when a file is gone, and which file is most like it."""
    having = [one.tag for one in (old, *between) if repository.read(one.commit, path) is not None]
    words = f"{path} is gone in {new.tag}: last seen in {having[-1]}"
    old_lines = _lines(repository.read(old.commit, path) or b"")
    suffix = path.rsplit("/", 1)[-1].rpartition(".")[2]
    changed = [
        one for one in repository.changes(old.commit, new.commit) if one.entry and one.path.endswith(f".{suffix}")
    ]
    blobs = repository.blobs([one.entry.blob for one in changed if one.entry])
    shares = [
        ((old_lines & _lines(data)).total() / max(1, old_lines.total()), one.path)
        for one, data in zip(changed, blobs, strict=True)
    ]
    share, likest = max(shares, default=(0.0, ""))
    return f"{words}; its content is most like {likest} ({share:.0%} of its lines)" if share >= _ALIKE else words


def _lines(data: bytes) -> Counter[bytes]:
    """A file's lines that say something, as often as they occur."""
    return Counter(line.strip() for line in data.splitlines() if len(line.strip()) > 3)
