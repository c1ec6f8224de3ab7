"""Upstream's changes in words, beyond what the scenarios of a rebase show."""

from __future__ import annotations

from pathlib import Path

from unidiff.patch import PatchSet

from scripts import upstream_change
from scripts.repository import Author, Repository
from scripts.upstream_change import Release
from tests.tool.miniature import MTIME

BODY = "        total = sum(values)\n        count = len(values)\n        mean = total / count\n        return mean\n"
OLD = f"import math\n\n\nclass Stats:\n    def mean(self, values):\n{BODY}"
DIFF = """\
--- a/vllm/stats.py
+++ b/vllm/stats.py
@@ -7,3 +7,3 @@
         count = len(values)
-        mean = total / count
+        mean = total / max(1, count)
         return mean
"""


def words(folder: Path, *releases: dict[str, str], diff: str = DIFF) -> list[str]:
    """What is said of a patch of vllm/stats.py between the first and the last of these releases."""
    repository = Repository.init(folder / "git")
    author = Author("A Person", "person@example.org", f"{MTIME} +0000")
    made = []
    for number, files in enumerate(releases):
        content = [(path, False, text.encode()) for path, text in files.items()]
        made.append(Release(f"v0.{number}", repository.import_files(f"refs/{number}", content, "x", author)))
    (file,) = PatchSet.from_string(diff)
    return upstream_change.describe(repository, made[0], made[-1], made[1:-1], file)


def test_last_seen_in_a_release_between(tmp_path: Path) -> None:
    had = {"vllm/stats.py": OLD}
    assert words(tmp_path, had, had, {"vllm/x.py": ""}, {"vllm/x.py": ""}) == [
        "vllm/stats.py is gone in v0.3: last seen in v0.1",
        "vllm/stats.py: Stats.mean is gone",
    ]


def test_method_moved_into_another_class_and_file(tmp_path: Path) -> None:
    new = {"vllm/stats.py": "import math\n", "vllm/metrics.py": OLD.replace("Stats", "Metrics")}
    assert words(tmp_path, {"vllm/stats.py": OLD}, new) == [
        "vllm/stats.py: Stats.mean moved to vllm/metrics.py as Metrics.mean"
    ]


def test_method_became_a_function(tmp_path: Path) -> None:
    new = {"vllm/stats.py": "def mean(values):\n" + BODY.replace("        ", "    ")}
    assert words(tmp_path, {"vllm/stats.py": OLD}, new) == ["vllm/stats.py: Stats.mean is mean now"]


def test_a_namesake_that_was_there_before_is_no_move(tmp_path: Path) -> None:
    other = OLD.replace("Stats", "Other")
    new = {"vllm/stats.py": "import math\n", "vllm/other.py": other}
    assert words(tmp_path, {"vllm/stats.py": OLD, "vllm/other.py": other}, new) == ["vllm/stats.py: Stats.mean is gone"]


def test_change_beside(tmp_path: Path) -> None:
    new = {"vllm/stats.py": OLD.replace("import math\n", "import math\nimport os\n")}
    assert words(tmp_path, {"vllm/stats.py": OLD}, new) == [
        "vllm/stats.py changed (+1 -0 lines), not in what the patch changes"
    ]


def test_no_python(tmp_path: Path) -> None:
    old, new = {"vllm/stats.py": f"not python (\n{OLD}"}, {"vllm/stats.py": f"not python (\n{OLD}\nmore\n"}
    assert words(tmp_path, old, new) == ["vllm/stats.py changed (+2 -0 lines), not in what the patch changes"]


def test_unchanged(tmp_path: Path) -> None:
    assert words(tmp_path, {"vllm/stats.py": OLD}, {"vllm/stats.py": OLD}) == []


def test_file_that_upstream_never_had(tmp_path: Path) -> None:
    assert words(tmp_path, {"vllm/x.py": ""}, {"vllm/x.py": ""}) == ["vllm/stats.py is not in v0.0 either"]
