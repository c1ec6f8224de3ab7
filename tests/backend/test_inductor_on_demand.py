"""`import vllm` leaves Inductor alone; whoever imports it finds vLLM's operators allowed to fall back."""

import subprocess
import sys

import pytest

ALLOWED = """
from torch._inductor import graph, lowering
assert graph.FALLBACK_ALLOW_LIST is lowering.FALLBACK_ALLOW_LIST
assert "vllm::any" in lowering.FALLBACK_ALLOW_LIST
assert "other::any" not in lowering.FALLBACK_ALLOW_LIST
"""
LATER = "import sys, vllm; assert 'torch._inductor.lowering' not in sys.modules"
BEFORE = "import torch._inductor.graph, vllm"


@pytest.mark.parametrize("first", [LATER, BEFORE])
def test_operators_may_fall_back(first):
    subprocess.run([sys.executable, "-c", f"{first}\n{ALLOWED}"], check=True)
