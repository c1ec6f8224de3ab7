"""The processes in which kernels run and compile without a GPU."""

from tests.kernels.conftest import compiler, interpreter

__all__ = ["compiler", "interpreter"]
