"""The runner of git: what a git that was killed leaves behind."""

from __future__ import annotations

from pathlib import Path

from scripts.repository import Repository


def test_private_index_of_a_killed_run(tmp_path: Path) -> None:
    repository = Repository.init(tmp_path / "git")
    for name in ("private-index", "private-index.lock"):
        (repository.git_dir / name).write_text("half")
    with repository.private_index() as index:
        tree = repository.write_tree(index)
        repository.read_tree(index, tree)
    assert repository.files(tree) == {}
    assert list(repository.git_dir.glob("private-index*")) == []


def test_locks_of_a_killed_git(tmp_path: Path) -> None:
    repository = Repository.init(tmp_path / "git")
    (repository.git_dir / "HEAD.lock").touch()
    repository.remove_locks("HEAD", "index")
    repository.run("symbolic-ref", "HEAD", "refs/heads/other")
