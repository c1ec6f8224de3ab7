"""`python -m vllm.sm120`, run in a package with nothing else of vLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import provenance
from scripts.sources import Build
from tests.wheel.synthetic import plugin_sources, small_pins

OVERLAY = Path(__file__).resolve().parents[2] / "overlay" / "vllm" / "sm120"


@pytest.fixture
def site(tmp_path: Path, build: Build) -> Path:
    """A site-packages folder with our vLLM."""
    package = tmp_path / "site" / "vllm"
    (package / "sm120").mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(OVERLAY / name, package / "sm120")
    (package / "sm120" / "provenance.json").write_bytes(provenance.render(provenance.document(build)))
    return package.parent


def install_plugin(site: Path, *, ours: bool) -> None:
    info = site / "vllm_gguf_plugin-0.0.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm-gguf-plugin\nVersion: 0.0.5\n")
    package = site / "vllm_gguf_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('the plugin must not be imported')\n")
    if ours:
        pins = small_pins()
        wheel = Path("vllm_gguf_plugin-0.0.5-cp310-abi3-manylinux_2_28_x86_64.whl")
        build = Build(pins, pins.project("vllm-gguf-plugin"), "x86_64", wheel, plugin_sources())
        (package / "sm120").mkdir()
        (package / "sm120" / "provenance.json").write_bytes(provenance.render(provenance.document(build)))


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-m", "vllm.sm120", *arguments]
    return subprocess.run(command, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False)


def test_text(site: Path) -> None:
    result = run(site)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "vllm 0.33.0+sm120.1 (x86_64)\n"
        "  upstream: https://github.com/vllm-project/vllm v0.33.0, commit 4ba787ec9\n"
        "  made from: vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl\n"
        f"  tree: {'5' * 40}\n"
        "  overlay: 2 files\n"
        "  patches: 1\n"
        "    raise-b.patch: Raise B, drop old\n"
        "      upstream: Submitted, https://github.com/vllm-project/vllm/pull/1\n"
        "      goes when: upstream raises B\n"
    )


def test_json_of_both_projects(site: Path, build: Build) -> None:
    install_plugin(site, ours=True)
    result = run(site, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    vllm, plugin = json.loads(result.stdout)
    assert vllm == provenance.document(build)
    assert (plugin["name"], plugin["version"]) == ("vllm-gguf-plugin", "0.0.5+sm120.1")


def test_upstreams_plugin_is_pointed_out(site: Path) -> None:
    install_plugin(site, ours=False)
    result = run(site)
    assert result.returncode == 1
    assert "vllm_gguf_plugin/sm120/provenance.json is missing" in result.stderr
    assert result.stdout.startswith("vllm 0.33.0+sm120.1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing: this is a source tree"),
        ("{", "is not readable"),
        ('{"schema": 2}', "has schema 2, expected 1"),
    ],
)
def test_provenance_that_is_not_there(site: Path, content: str | None, message: str) -> None:
    path = site / "vllm" / "sm120" / "provenance.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    result = run(site, "--json")
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert json.loads(result.stdout) == []


def test_schema_is_the_builds() -> None:
    assert f"_SCHEMA = {provenance.SCHEMA}\n" in (OVERLAY / "__init__.py").read_text()
