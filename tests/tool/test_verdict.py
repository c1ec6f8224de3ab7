"""Every verdict, on golden folders: `upstream/` and the patches in `before/` give `after/` or what is expected.

`older/`, where there is one, is an earlier upstream release that the patches were made for.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import series
from scripts.errors import ApplyError
from scripts.repository import Author, Repository
from scripts.series import Applied
from scripts.verdict import Kind
from tests.tool.miniature import MTIME, Checkout, read_files

SCENARIOS = sorted(Path(__file__).with_name("scenarios").iterdir())


def lay(checkout: Checkout, scenario: Path) -> tuple[Repository, Applied]:
    """Apply a scenario's series to its upstream."""
    shutil.rmtree(checkout.patches)
    shutil.rmtree(checkout.root / "overlay")
    shutil.copytree(scenario / "before", checkout.patches)
    repository = Repository.init(checkout.root / "git")
    for name in ("older", "upstream"):
        files = read_files(scenario / name) if (scenario / name).is_dir() else {}
        content = [(path, executable, data) for path, (data, executable) in files.items()]
        author = Author("A Person", "person@example.org", f"{MTIME} +0000")
        upstream = repository.import_files(f"refs/upstream/{name}", content, name, author)
    return repository, series.apply(checkout.layout, checkout.project, repository, upstream)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.name)
def test_scenario(checkout: Checkout, scenario: Path) -> None:
    expected = json.loads((scenario / "expected.json").read_text())
    repository, applied = lay(checkout, scenario)
    assert [str(step.verdict) for step in applied.steps] == expected["verdicts"]
    explanation = "\n".join(step.verdict.explanation for step in applied.steps)
    for text in expected["explained"]:
        assert text in explanation
    if (scenario / "after").is_dir():
        tree = repository.files(applied.tip)
        after = {path: data for path, (data, _) in read_files(scenario / "after").items()}
        assert dict(zip(tree, repository.blobs([entry.blob for entry in tree.values()]), strict=True)) == after
    good = all(verdict.startswith(("exact", "offset")) for verdict in expected["verdicts"])
    if good:
        applied.refuse_bad()
    else:
        with pytest.raises(ApplyError) as refused:
            applied.refuse_bad()
        bad = [step for step in applied.steps if not step.verdict.good]
        for step in bad:
            assert f"{step.patch.path}: {step.verdict}\n{step.verdict.explanation}" in str(refused.value)


def test_every_verdict_has_a_scenario() -> None:
    verdicts = [text for path in SCENARIOS for text in json.loads((path / "expected.json").read_text())["verdicts"]]
    assert {verdict.split("(")[0] for verdict in verdicts} == set(Kind)


def test_fuzz_is_what_patch_would_take(tmp_path: Path) -> None:
    """The scenario `fuzz`, whose verdict is a conflict, is one that GNU patch lets pass."""
    if not shutil.which("patch"):
        pytest.skip("GNU patch is not installed")
    scenario = Path(__file__).with_name("scenarios") / "fuzz"
    shutil.copytree(scenario / "upstream", tmp_path / "tree")
    result = subprocess.run(
        ["patch", "-p1", f"--input={scenario / 'before' / 'step.patch'}"],
        cwd=tmp_path / "tree",
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "with fuzz" in result.stdout
