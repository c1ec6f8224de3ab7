"""Options, skip reasons, and what the engine tests share: one model, its reference, the engines, the results."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import tiny_gguf, tiny_glm, tiny_glm5next
from tests.gpu.engine import Engines, Run, visible_gpus
from tests.gpu.results import gpu_slug, write_results
from tests.gpu.tiny_glm import Reference


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="folder to write measurements to, as JSON")
    parser.addoption("--stock-site", type=Path, help="folder that holds the unpatched vLLM")
    parser.addoption("--engines", type=int, help="how many engines run at a time (default: cores / 2, at most 8 a GPU)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> tuple[Path, Reference]:
    """The folder of the tiny GLM-5, and what it computes in float32."""
    path = tmp_path_factory.mktemp("tiny-glm")
    return path, Reference(tiny_glm.make_model(path).cuda())


@pytest.fixture(scope="session")
def glm5next(tmp_path_factory) -> tuple[Path, Reference]:
    """The folder of the tiny GLM-5.3-Flash, and what it computes in float32."""
    path = tmp_path_factory.mktemp("tiny-glm5next")
    return path, tiny_glm5next.Glm5NextReference(tiny_glm5next.make_model(path).cuda())


@pytest.fixture(scope="session")
def gguf_models(tmp_path_factory) -> dict[str, tiny_gguf.TinyGguf]:
    """The tiny GGUF models by name."""
    return {name: tiny_gguf.TinyGguf(tmp_path_factory.mktemp(name), name) for name in tiny_gguf.MODELS}


@pytest.fixture(scope="session")
def reference(model) -> Reference:
    return model[1]


@pytest.fixture(scope="session")
def engines(request, tmp_path_factory) -> Iterator[Engines]:
    """The engines. Those that the selected tests name in their parameters start at once."""
    most = min(8 * len(visible_gpus()), len(os.sched_getaffinity(0)) // 2)
    workers = request.config.getoption("--engines", None) or max(1, most)
    runs = [run for item in request.session.items for run in _runs_of(item)]
    wanted = {run.model for run in runs}
    models = {}
    if "tiny-glm" in wanted:
        models["tiny-glm"] = request.getfixturevalue("model")[0]
    if "tiny-glm5next" in wanted:
        models["tiny-glm5next"] = request.getfixturevalue("glm5next")[0]
    if wanted - models.keys():
        for name, files in request.getfixturevalue("gguf_models").items():
            models |= {f"{name}, GGUF": files.gguf, f"{name}, safetensors": files.safetensors}
    stock_site = request.config.getoption("--stock-site", None)
    engines = Engines(models, tmp_path_factory.mktemp("engines"), workers, stock_site)
    engines.start(run for run in runs if engines.can_run(run))
    yield engines
    engines.close()


def _runs_of(item: pytest.Item) -> list[Run]:
    if item.get_closest_marker("skip") or not hasattr(item, "callspec"):
        return []
    return [value for value in item.callspec.params.values() if isinstance(value, Run)]


@pytest.fixture(scope="session")
def all_rows() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def rows(request, all_rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Accuracy measurements, written to --results after each test: an interrupted run keeps what it has."""
    yield all_rows
    if (results := request.config.getoption("--results", None)) and all_rows:
        write_results(results / f"engine-{gpu_slug()}.json", all_rows)
