"""Git, and the only module that runs it: a thin, typed runner over GitPython.

Every command names its repository (GIT_DIR), so that git never climbs into a repository around it, and
reads no configuration but the repository's own, so that a user's settings cannot change a result.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from scripts.errors import GitError

try:
    import git
except ImportError:  # GitPython looks for git when it is imported
    raise GitError("git is not installed, or not on the PATH", cure="install git 2.39 or later") from None

#: Committer of every commit that the tool makes; the author of a patch is the author in its mail.
IDENTITY = ("vllm-sm120", "maintainers@vllm-sm120.invalid")

# A hook or an alias of an outer repository exports GIT_DIR, GIT_INDEX_FILE and more to us. None of it is meant
# for the repositories that we run in. What concerns the network (proxies, credentials) stays.
_KEPT = ("GIT_PYTHON_", "GIT_SSH", "GIT_SSL_", "GIT_PROXY_", "GIT_ASKPASS", "GIT_EXEC_PATH")
for _name in [name for name in os.environ if name.startswith("GIT_") and not name.startswith(_KEPT)]:
    del os.environ[_name]

_ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_COMMITTER_NAME": IDENTITY[0],
    "GIT_COMMITTER_EMAIL": IDENTITY[1],
    "LC_ALL": "C",
    "TZ": "UTC",
}
# Options of the repository itself win over files, and these over the repository's own.
_OPTIONS = (
    *("-c", "core.autocrlf=false"),
    *("-c", "core.quotePath=false"),
    *("-c", "core.attributesFile=/dev/null"),
    *("-c", "core.excludesFile=/dev/null"),
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "commit.gpgSign=false"),
    *("-c", "diff.renames=false"),
    *("-c", "gc.auto=0"),
)
# Upstream's own attributes, or a user's core.autocrlf, convert line ends or choose the diff of a language; these, which
# neither can override, keep a work tree to upstream's bytes and a patch to git's plain diff, in the user's git as well.
_ATTRIBUTES = "* -text -ident !filter !working-tree-encoding !diff !merge\n"


@dataclass(frozen=True)
class Output:
    """What one git command gave back."""

    status: int
    stdout: bytes
    stderr: str

    def __bool__(self) -> bool:
        return self.status == 0


@dataclass(frozen=True)
class Entry:
    """A file of a git tree; `mode` is 100644, 100755 or 120000."""

    mode: str
    blob: str


#: What `update_index` takes a file out of an index with.
REMOVED = Entry("0", 40 * "0")


@dataclass(frozen=True)
class Change:
    """A file that differs between two trees; `entry` is the new side and None where the file is gone."""

    status: Literal["A", "M", "D", "T"]
    path: str
    entry: Entry | None


@dataclass(frozen=True)
class Author:
    """Who wrote a commit, and when (any form git reads)."""

    name: str
    email: str
    date: str


@dataclass(frozen=True)
class Mail:
    """A format-patch mail, taken apart as `git am` does it."""

    author: Author
    subject: str
    body: str
    diff: bytes


class Repository:
    """One git repository: `git_dir`, and `work_tree` where there is one."""

    def __init__(self, git_dir: Path, work_tree: Path | None = None) -> None:
        self.git_dir = git_dir.absolute()
        self.work_tree = work_tree.absolute() if work_tree else None
        self._git = git.Git(str(self.work_tree or self.git_dir.parent))

    @classmethod
    def init(cls, git_dir: Path, work_tree: Path | None = None, objects: Path | None = None) -> Repository:
        """Make a repository (or take the one that is there) that also reads the object folder `objects`."""
        git_dir.mkdir(parents=True, exist_ok=True)
        repository = cls(git_dir, work_tree)
        repository.run("init", "--quiet", "--initial-branch=main", "--template=")
        if objects:
            repository._write_info(git_dir / "objects" / "info" / "alternates", f"{objects.absolute()}\n")
        if work_tree:
            repository._write_info(git_dir / "info" / "attributes", _ATTRIBUTES)
        return repository

    @staticmethod
    def _write_info(path: Path, text: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    @property
    def objects(self) -> Path:
        return self.git_dir / "objects"

    # -- running -------------------------------------------------------------------------------------

    def attempt(
        self, *arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None, index: Path | None = None
    ) -> Output:
        """Run git and report; a failure is for the caller to judge."""
        with tempfile.TemporaryFile() as source:
            source.write(stdin)
            source.seek(0)
            status, stdout, stderr = self._git.execute(
                ["git", *_OPTIONS, *arguments],
                istream=source,
                env=self._environment(env, index),
                with_extended_output=True,
                with_exceptions=False,
                stdout_as_string=False,
                strip_newline_in_stdout=False,
            )
        return Output(status, stdout, stderr)

    def run(
        self, *arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None, index: Path | None = None
    ) -> bytes:
        """Run git and return its output.

        Raises:
            GitError: it failed.
        """
        output = self.attempt(*arguments, stdin=stdin, env=env, index=index)
        if not output:
            raise GitError(f"git {arguments[0]} in {self.git_dir}: {output.stderr.strip() or output.status}")
        return output.stdout

    def line(self, *arguments: str, stdin: bytes = b"", index: Path | None = None) -> str:
        """Run git and return its one line of output."""
        return self.run(*arguments, stdin=stdin, index=index).decode().strip()

    def _environment(self, extra: Mapping[str, str] | None, index: Path | None) -> dict[str, str]:
        environment = {**_ENVIRONMENT, "GIT_DIR": str(self.git_dir)}
        if self.work_tree:
            environment["GIT_WORK_TREE"] = str(self.work_tree)
        if index:
            environment["GIT_INDEX_FILE"] = str(index)
        return {**environment, **(extra or {})}

    # -- reading -------------------------------------------------------------------------------------

    def ref(self, name: str) -> str | None:
        """The commit that `name` stands for, or None."""
        if not self.git_dir.exists():
            return None
        output = self.attempt("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        return output.stdout.decode().strip() if output else None

    def tree(self, commit: str) -> str:
        """The id of a commit's tree."""
        return self.line("rev-parse", "--verify", "--end-of-options", f"{commit}^{{tree}}")

    def commits(self, base: str, tip: str) -> list[str]:
        """The commits after `base` up to `tip`, oldest first."""
        return self.run("rev-list", "--reverse", "--end-of-options", f"{base}..{tip}").decode().split()

    def parents(self, commit: str) -> list[str]:
        """The ids of a commit's parents."""
        return self.line("rev-list", "--parents", "--max-count=1", "--end-of-options", commit).split()[1:]

    def files(self, tree: str, *paths: str) -> dict[str, Entry]:
        """Every file of a tree, or those of these files and folders in it, by its path from the top."""
        listing = self.run("ls-tree", "-r", "-z", "--full-tree", tree, "--", *paths).decode(errors="surrogateescape")
        entries = {}
        for record in listing.split("\0")[:-1]:
            meta, path = record.split("\t", 1)
            mode, _, blob = meta.split(" ")
            entries[path] = Entry(mode, blob)
        return entries

    def changes(self, base: str, tip: str) -> list[Change]:
        """The files that differ between two trees or commits."""
        arguments = ("diff-tree", "-r", "-z", "--no-renames", "--end-of-options", base, tip)
        fields = self.run(*arguments).decode(errors="surrogateescape").split("\0")[:-1]
        changes = []
        for meta, path in zip(fields[::2], fields[1::2], strict=True):
            _, mode, _, blob, status = meta.split(" ")
            kind = cast("Literal['A', 'M', 'D', 'T']", status)
            changes.append(Change(kind, path, None if kind == "D" else Entry(mode, blob)))
        return changes

    def blobs(self, ids: Sequence[str]) -> Iterator[bytes]:
        """The contents of blobs, in the order asked for."""
        output = memoryview(self.run("cat-file", "--batch", stdin="\n".join(ids).encode() + b"\n" if ids else b""))
        position = 0
        for blob in ids:
            end = bytes(output[position : position + 200]).index(b"\n") + position
            fields = bytes(output[position:end]).decode().split(" ")
            if len(fields) != 3:
                raise GitError(f"{self.git_dir} lacks object {blob}")
            start, size = end + 1, int(fields[2])
            yield bytes(output[start : start + size])
            position = start + size + 1

    def read(self, tree: str, path: str) -> bytes | None:
        """A file's content in a tree or commit, or None where the tree has no such file."""
        output = self.attempt("cat-file", "blob", f"{tree}:{path}")
        return output.stdout if output else None

    def mailinfo(self, text: bytes) -> Mail | None:
        """A format-patch mail taken apart, or None where it is not one."""
        with tempfile.TemporaryDirectory() as folder:
            body, diff = Path(folder, "body"), Path(folder, "diff")
            info = self.attempt("mailinfo", "-b", "--no-scissors", "--encoding=UTF-8", str(body), str(diff), stdin=text)
            lines = info.stdout.decode(errors="replace").splitlines()
            fields = dict(line.split(": ", 1) for line in lines if ": " in line)
            if not info or not {"Author", "Email", "Subject", "Date"} <= fields.keys():
                return None
            author = Author(fields["Author"], fields["Email"], fields["Date"])
            return Mail(author, fields["Subject"], body.read_text(encoding="utf-8"), diff.read_bytes())

    def trailers(self, message: str) -> dict[str, str]:
        """The trailers at the end of a commit message, each on one line."""
        lines = self.run("interpret-trailers", "--parse", stdin=message.encode()).decode().splitlines()
        return dict(line.split(": ", 1) for line in lines if ": " in line)

    def format_patch(self, commit: str) -> bytes:
        """A commit as a format-patch mail that depends on nothing but the commit and its parent's tree."""
        return self.run(
            "format-patch",
            *("--zero-commit", "--no-signature", "--full-index", "--no-stat", "--no-numbered", "--keep-subject"),
            *("--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--diff-algorithm=myers", "--unified=3"),
            *("--src-prefix=a/", "--dst-prefix=b/", "--no-attach", "--no-thread", "--no-cover-letter", "--no-base"),
            *("--stdout", "--max-count=1", commit),
        )

    # -- writing -------------------------------------------------------------------------------------

    def import_files(self, ref: str, files: Iterable[tuple[str, bool, bytes]], message: str, author: Author) -> str:
        """Make a parentless commit of (path, executable, content) and point `ref` at it.

        git fast-import needs no work tree, so neither an ignore file nor an attribute of upstream's can
        drop or change a file. `author.date` is `<seconds> +0000`.
        """
        arguments = ("fast-import", "--quiet", "--done", "--date-format=raw", "--depth=0")
        process = self._git.execute(
            ["git", *_OPTIONS, "-c", "core.compression=1", *arguments],
            istream=subprocess.PIPE,
            env=self._environment(None, None),
            as_process=True,
        )
        try:
            stdin = process.stdin
            assert stdin is not None
            text = message.encode()
            header = (
                f"commit {ref}\nauthor {author.name} <{author.email}> {author.date}\n"
                f"committer {IDENTITY[0]} <{IDENTITY[1]}> {author.date}\n"
            )
            stdin.write(header.encode() + b"data %d\n%s\n" % (len(text), text))
            for path, executable, data in files:
                mode = "100755" if executable else "100644"
                stdin.write(f"M {mode} inline {path}\ndata {len(data)}\n".encode() + data + b"\n")
            stdin.write(b"done\n")  # where it is missing, because this run was killed, git makes no commit
            stdin.close()
        except BrokenPipeError:
            pass  # git said why on stderr, which wait() reports
        try:
            process.wait()
        except git.GitCommandError as error:
            raise GitError(f"git fast-import in {self.git_dir}: {error.stderr}") from None
        commit = self.ref(ref)
        assert commit is not None
        return commit

    def add_blobs(self, contents: Sequence[Path]) -> list[str]:
        """Store files as they are, without any conversion, and return their blob ids."""
        if not contents:
            return []
        names = "\n".join(str(path.absolute()) for path in contents).encode()
        return self.run("hash-object", "-w", "--no-filters", "--stdin-paths", stdin=names).decode().split()

    @contextmanager
    def private_index(self) -> Iterator[Path]:
        """An index file of our own, which is not there yet; what a killed run left of it goes first."""
        path = self.git_dir / "private-index"
        for left in (path, path.with_name(f"{path.name}.lock")):
            left.unlink(missing_ok=True)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def remove_locks(self, *names: str) -> None:
        """Remove locks on files of the repository that a killed git left; the caller keeps other runs out."""
        for name in names:
            (self.git_dir / f"{name}.lock").unlink(missing_ok=True)

    def update_index(self, index: Path, entries: Mapping[str, Entry]) -> None:
        """Put files into an index."""
        lines = "".join(f"{entry.mode} {entry.blob}\t{path}\0" for path, entry in entries.items())
        self.run("update-index", "-z", "--index-info", stdin=lines.encode(), index=index)

    def read_tree(self, index: Path, tree: str) -> None:
        """Make an index hold exactly a tree."""
        self.run("read-tree", tree, index=index)

    def write_tree(self, index: Path) -> str:
        """Store an index as a tree and return its id."""
        return self.line("write-tree", index=index)

    def commit(self, tree: str, parents: Sequence[str], message: str, author: Author) -> str:
        """Make a commit; the committer's date is the author's, so that the id depends on the content alone."""
        env = {
            "GIT_AUTHOR_NAME": author.name,
            "GIT_AUTHOR_EMAIL": author.email,
            "GIT_AUTHOR_DATE": author.date,
            "GIT_COMMITTER_DATE": author.date,
        }
        options = [option for parent in parents for option in ("-p", parent)]
        return self.run("commit-tree", tree, *options, stdin=message.encode(), env=env).decode().strip()

    def apply(
        self, diff: bytes, index: Path, *, reverse: bool = False, three_way: bool = False, check: bool = False
    ) -> Output:
        """Apply a diff to an index, whole or not at all and without fuzz; what git says is on stderr."""
        flags = [flag for flag, wanted in (("--reverse", reverse), ("--3way", three_way), ("--check", check)) if wanted]
        return self.attempt(
            "apply", "--cached", "--verbose", "--whitespace=nowarn", *flags, "-", stdin=diff, index=index
        )
