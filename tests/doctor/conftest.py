"""The doctor of the installed vLLM, in a process of its own: it changes vLLM for good."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from . import ask

CONFIGS = Path(__file__).parent / "configs"
CACHED = "zai-org/GLM-5"  # the repository id that the child finds in its cache of Hugging Face


class Doctor:
    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __call__(self, model: str | Path, *options: str, sections: tuple[str, ...] = ()) -> dict[str, Any]:
        """Ask about configs/MODEL, or about any path or repository; see ask.ask."""
        return self._pool.submit(ask.ask, _path(model), *options, sections=sections).result()

    def without_flashinfer(self, model: str, *options: str) -> dict[str, Any]:
        """Ask with a FlashInfer that lacks the sparse MLA decode API."""
        return self._pool.submit(ask.ask_without_flashinfer, _path(model), *options).result()

    def select(self, layer: dict[str, Any], model: str, *options: str) -> str:
        """Return what vLLM's selector gives such a layer; see ask.select."""
        return self._pool.submit(ask.select, layer, _path(model), *options).result()


def _path(model: str | Path) -> str:
    folder = CONFIGS / model
    return str(folder if folder.exists() else model)


@pytest.fixture(scope="session")
def doctor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doctor]:
    hub = tmp_path_factory.mktemp("hub")
    snapshot = hub / f"models--{CACHED.replace('/', '--')}" / "snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(CONFIGS / "glm5/config.json")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0123")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "HF_HUB_CACHE", str(hub))
        patch.setitem(os.environ, "VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            yield Doctor(pool)
