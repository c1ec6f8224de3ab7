"""Options and the skip reason of the tests that need a GPU."""

from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="folder to write measurements to, as JSON")
    parser.addoption("--stock-site", type=Path, help="folder that holds the unpatched vLLM")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
