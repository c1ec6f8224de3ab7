"""The wheels as `make install` leaves them in the environment that runs the tests."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import build, pins
from scripts.layout import Layout, default_cache

LAYOUT = Layout(Path(__file__).resolve().parents[2], default_cache())
PINS = pins.load(LAYOUT.pins)


def installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(installed_version, PINS.projects)), reason="needs the wheels: `make install`"),
]


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout


def test_provenance_is_that_of_this_repository() -> None:
    reports = {report["name"]: report for report in json.loads(run("-m", "vllm.sm120", "--json"))}
    assert reports.keys() == PINS.projects.keys()
    for project in PINS.projects.values():
        report = reports[project.name]
        _, sources = build.prepare(LAYOUT, project)
        assert report["version"] == installed_version(project.name) == project.local_version
        assert report["tree"] == sources.tree
        assert [(patch["name"], patch["sha256"]) for patch in report["patches"]] == [
            (patch.name, patch.sha256) for patch in sources.patches
        ]


def test_vllm_imports_and_says_its_version() -> None:
    expected = PINS.projects["vllm"].local_version
    assert run("-c", "import vllm; print(vllm.__version__)").strip() == expected


def test_the_plugin_registers() -> None:
    script = "import vllm_gguf_plugin as p; p.register(); from vllm.model_executor.layers.quantization import *;"
    script += "print('gguf' in QUANTIZATION_METHODS)"
    assert run("-c", script).split()[-1] == "True"


def test_every_dependency_is_satisfied() -> None:
    assert "No broken requirements found" in run("-m", "pip", "check")


def test_gguf_extra_brings_our_plugin_only() -> None:
    requirements = importlib.metadata.requires("vllm") or []
    plugin = [one for one in requirements if one.startswith("vllm-gguf-plugin")]
    assert plugin
    version = PINS.projects["vllm-gguf-plugin"].local_version
    assert all(one.split(";")[0].strip() == f"vllm-gguf-plugin=={version}" for one in plugin)
