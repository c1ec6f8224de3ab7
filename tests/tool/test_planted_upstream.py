"""What a next release may do to the series of this repository, planted in upstream's own sources."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.version import Version

from scripts import overlay, overlay_check, pins, series, upstream, upstream_change
from scripts.layout import Layout
from scripts.repository import REMOVED, Entry, Repository
from scripts.series import Applied
from scripts.upstream_change import Release
from tests.tool.miniature import REPOSITORY
from tests.tool.test_rebase_upstream import CACHE

pytestmark = pytest.mark.slow

MLA = "vllm/v1/attention/backends/mla"
KPOOL = "vllm/models/glm5next/nvidia/ops/kpool_compress.py"
UTILS, HELPERS = f"{MLA}/sparse_utils.py", f"{MLA}/sparse_helpers.py"
NO_MODULE = f"no module {MLA.replace('/', '.')}.sparse_utils, from which"

#: By planted change: the verdicts that are not good, the overlay's problems, and what is said of the files.
EXPECTED: Mapping[str, tuple[dict[str, str], list[str], list[str]]] = {
    "a patch that upstream has taken": ({"sm120-gates.patch": "upstreamed"}, [], []),
    "a file that moved": (
        {"sparse-mla-topk-width.patch": f"file-gone({UTILS})"},
        [
            f"{NO_MODULE} align_blocks_to_rows is imported; align_blocks_to_rows is in {HELPERS}",
            f"{NO_MODULE} flat_kv_row_view is imported; flat_kv_row_view is in {HELPERS}",
        ],
        [
            f"{UTILS} is gone in v2: last seen in v1; its content is most like {HELPERS} (100% of its lines)",
            f"{UTILS}: triton_convert_req_index_to_global_index moved to {HELPERS}",
        ],
    ),
    "a file that is deleted": (
        {"dsa-fp8-software.patch": f"file-gone({KPOOL})"},
        [],
        [f"{KPOOL} is gone in v2: last seen in v1", f"{KPOOL}: _fwht_quant_kernel is gone"],
    ),
    "a signature that changed": (
        {},
        [f"{MLA.replace('/', '.')}.sparse_utils.flat_kv_row_view(): missing a required argument: 'block_size'"],
        [],
    ),
}


def planted(repository: Repository, base: Applied, folder: Path) -> dict[str, dict[str, Entry]]:
    """The files that each planted change replaces."""
    (gates,) = (step.commit for step in base.steps if step.patch.name == "sm120-gates.patch")
    assert gates
    utils = repository.files(base.upstream, UTILS)[UTILS]
    text = (repository.read(base.upstream, UTILS) or b"").decode()
    assert text.count("def flat_kv_row_view(\n") == 1
    other = folder / "sparse_utils.py"
    other.write_text(text.replace("def flat_kv_row_view(\n", "def flat_kv_row_view(\n    planted: int,\n"))
    taken = {change.path: change.entry or REMOVED for change in repository.changes(f"{gates}^", gates)}
    signature = {UTILS: Entry("100644", repository.add_blobs([other])[0])}
    changes = (taken, {UTILS: REMOVED, HELPERS: utils}, {KPOOL: REMOVED}, signature)
    return dict(zip(EXPECTED, changes, strict=True))


def test_each_is_reported_as_what_it_is(tmp_path: Path) -> None:
    """And nothing else is reported beside it."""
    layout = Layout(tmp_path / "root", CACHE)
    project = pins.load(REPOSITORY / "upstream.toml").project("vllm")
    if Version(project.version) not in upstream.imported(layout, project):
        pytest.skip(f"{project.tag} is not in the cache: `make tree` brings it there")
    for name in ("patches", "overlay"):
        shutil.copytree(REPOSITORY / name, layout.root / name)
    pinned = upstream.from_sdist(layout, project)
    with series.workshop(layout, pinned) as repository:
        base = series.apply(layout, project, repository, pinned.commit)
        ours, patches = overlay.files(layout, project), [step.patch for step in base.steps]
        for change, entries in planted(repository, base, tmp_path).items():
            with repository.private_index() as index:
                repository.read_tree(index, pinned.commit)
                repository.update_index(index, entries)
                tree = repository.write_tree(index)
            commit = repository.commit(tree, [], f"{change}\n", patches[0].author)
            applied = series.lay(project, repository, commit, ours, patches)
            problems = overlay_check.check(repository, ours, upstream=commit, tip=applied.tip, pinned=base.tip)
            bad = [step for step in applied.steps if not step.verdict.good]
            releases = Release("v1", pinned.commit), Release("v2", commit)
            said = [
                line
                for step in bad
                for file in step.patch.files
                for line in upstream_change.describe(repository, *releases, [], file)
            ]
            verdicts, expected, words = EXPECTED[change]
            assert {step.patch.name: str(step.verdict) for step in bad} == verdicts
            assert [problem.message for problem in problems] == expected
            assert said[: len(words)] == words
