"""Upstream's own tests of the sparse indexer's logits, run against the Triton kernels that serve without DeepGEMM.

The test file is upstream's, read from the patched tree (`make tree`) and never kept here. CHANGES says all that is
changed in it; FILES is what a machine without the tree needs below build/vllm:

    python -c "from tests.gpu import test_upstream_indexer as a, test_upstream_sparse_mla as b
    print(*(f'build/vllm/{name}' for name in {*a.FILES, *b.FILES}), sep='\\n')" | tar -cJf upstream-tests.tar.xz -T -

In the process that runs them every function of DeepGEMM raises.
"""

from typing import Any

import pytest
import torch

from tests.gpu.child_pytest import run_pytest
from tests.gpu.engine import HERE, TRITON_INDEXER
from tests.gpu.results import gpu_slug, write_results
from tests.gpu.test_upstream_sparse_mla import TREE, Change

TESTS = "tests/kernels/attention/test_deepgemm_attention.py"
FILES = ["tests/__init__.py", TESTS]
#: How many cases each of the file's tests has. None is skipped.
CASES = {
    "test_deepgemm_fp8_mqa_logits": 3,
    "test_deepgemm_fp8_fp4_paged_mqa_logits": 3,
    "test_deepgemm_paged_mqa_packed_manager_block_stride": 1,
}
CHANGES = [
    Change("the fallback serves from SM80 on", "has_device_capability(90)", "has_device_capability(80)", 3),
    Change("DeepGEMM's count of multiprocessors is not used", "    get_num_sms,\n", ""),
    Change("it is the platform's", "get_num_sms()", "current_platform.num_compute_units()", 2),
]


def changed_tests(text: str) -> str:
    """Return upstream's test file with the changes."""
    for change in CHANGES:
        found = text.count(change.old)
        assert found == change.count, f"{change.why}: upstream has {found} of {change.old!r}"
        text = text.replace(change.old, change.new)
    return text


def require_tree() -> None:
    if missing := [name for name in FILES if not (TREE / name).exists()]:
        pytest.skip(f"needs upstream's tests: `make tree` ({TREE / missing[0]} is not there)")


@pytest.fixture(scope="module")
def counts(request):
    """What passed, written to --results at the end."""
    rows: list[dict[str, Any]] = []
    yield rows
    if (results := request.config.getoption("--results", None)) and rows:
        changes = [change.why for change in CHANGES]
        write_results(results / f"upstream-indexer-{gpu_slug()}.json", rows, changes=changes)


def test_changes_fit_upstreams_file():
    require_tree()
    compile(changed_tests((TREE / TESTS).read_text()), TESTS, "exec")


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [None, "8.0", "12.0"])
def test_upstream_tests_pass(tmp_path, counts, capability):
    """As the GPU at hand, and as others: on 8.0 with e4m3 in software, on 12.0 with pages of 64."""
    require_tree()
    if capability is None and torch.cuda.get_device_capability()[0] == 10:
        pytest.skip("needs a GPU other than SM100, where only DeepGEMM can read the indexer's cache")
    folder = tmp_path / "upstream"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = (TREE / name).read_text()
        (folder / name).write_text(changed_tests(text) if name == TESTS else text)
    path, environment = [HERE / "raising_deep_gemm"], dict(TRITON_INDEXER)
    if capability is not None:
        path.append(HERE / "fake_capability")
        environment["FAKE_CAPABILITY"] = capability
    run = run_pytest(
        ["--tb=short", TESTS], cwd=folder, report=tmp_path / "report.xml", environment=environment, path=path
    )
    assert run.returncode == 0, run.output[-20_000:]

    passed = [case.test for case in run.cases if case.outcome == "passed"]
    new_rows = [{"test": test, "capability": capability or "the GPU's", "passed": passed.count(test)} for test in CASES]
    counts += new_rows
    assert {row["test"]: row["passed"] for row in new_rows} == CASES
    assert len(passed) == len(run.cases)
