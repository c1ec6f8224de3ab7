"""What the doctor does not import although vLLM asks for it."""

import importlib.metadata
import subprocess
import sys

import pytest
from vllm.sm120.doctor import spare

SPARED = ("openai", "fastapi", "xgrammar", "torchvision", "opentelemetry.sdk", "aiohttp", "torch._dynamo.utils")
CHILD = f"""
import inspect, sys
from vllm.sm120.doctor import facts, host
host.pretend(facts.Gpu("any", (12, 0), None, "a test"))
import vllm.compilation.decorators
import vllm.engine.arg_utils
print([name for name in {SPARED} if name in sys.modules])

from triton.runtime.jit import JITFunction
from vllm.v1.attention.ops import triton_mla_sparse, triton_mqa_logits
values = [*vars(triton_mla_sparse).values(), *vars(triton_mqa_logits).values()]
kernels = [value for value in values if isinstance(value, JITFunction)]
assert len(kernels) > 5
for kernel in kernels:
    source = inspect.getsource(kernel.fn)
    assert kernel.src.strip() == source[source.index("def ") :].strip(), kernel
"""


@pytest.fixture
def finder(tmp_path, monkeypatch):
    """Finds a stand-in for `spared_things.heavy`, which is there, and for a module that is not."""
    package = tmp_path / "spared_things"
    (package / "heavy").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "heavy" / "__init__.py").touch()
    (package / "heavy" / "inner.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = spare._Finder(["spared_things.heavy", "spared_things.gone"])
    monkeypatch.setattr(sys, "meta_path", [found, *sys.meta_path])
    yield found
    for name in [name for name in sys.modules if name.startswith("spared_things")]:
        del sys.modules[name]


def test_the_configuration_comes_without_them_and_triton_has_its_sources():
    child = subprocess.run([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, check=True)
    assert child.stdout.splitlines()[-1] == "[]"


def test_a_stand_in_becomes_the_module_when_it_is_called(finder):
    from spared_things.heavy.inner import double

    assert isinstance(double, type)
    assert double | None
    assert double[int] | None
    assert double(21) == 42
    from spared_things.heavy.inner import double as real

    assert not isinstance(real, type)


def test_who_imports_it_later_gets_the_real_one(finder):
    import spared_things.heavy.inner as stand_in

    finder.end()
    import spared_things.heavy.inner as real

    assert real is not stand_in
    assert real.double(21) == 42


def test_a_module_that_is_gone_stays_gone(finder):
    with pytest.raises(ModuleNotFoundError, match="gone"):
        import spared_things.gone  # noqa: F401


@pytest.mark.parametrize("package", ["torch", "transformers", "yaml", "PIL", "cv2", "numpy"])
def test_versions_are_found_as_by_importlib(package):
    expected = importlib.metadata.packages_distributions().get(package, [])
    assert set(spare._packages_distributions().get(package, [])) == set(expected)
