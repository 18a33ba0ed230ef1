"""Torch's compiler is imported only where something is compiled."""

import subprocess
import sys

import pytest
from conftest import HANGS, ROOT

_OUTLINED = """
import sys, torch
from accept_mpi import models
from accept_mpi.profiling.outline import outline
outline(models.load("mobilenetv2", {"width": 0.25}, 0), 0, (torch.zeros(3, 3, 32, 32),))
_REAL = {"torch._dynamo.utils", "torch.utils._sympy", "sympy.core"}
assert not _REAL & set(sys.modules)
"""
_USES = {
    "a compiled function": """
called = []
def backend(graph, inputs):
    called.append(graph)
    return graph
@torch.compile(backend=backend)
def double(x):
    return x * 2
assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0)) and called
""",
    "a part of it": """
import torch._dynamo.config as config
assert config.__name__ == "torch._dynamo.config" and torch._dynamo.config is config
""",
    "a name of it": """
from torch._dynamo import is_compiling
assert is_compiling() is False
""",
    "a function that is not to be compiled": """
def own(x):
    return x
marked = torch.compiler.disable(own)
assert marked is not own and marked(3) == 3
""",
    "a function that was spared": """
def spared():
    pass
setattr(spared, "__dynamo_disable", torch._dynamo.disable(spared, True, wrapping=False))
assert getattr(spared, "__dynamo_disable") is spared
assert torch._dynamo.config
assert not hasattr(spared, "__dynamo_disable")
""",
    "who looks for where things come from": """
import importlib.util, inspect
inspect.getmodule(inspect.currentframe())
assert importlib.util.find_spec("torch._dynamo").origin.endswith("__init__.py")
assert "torch._dynamo.utils" not in sys.modules
raise SystemExit
""",
}


_USES_OF_SHAPES = {
    "a size that is not known": """
from torch._subclasses.fake_tensor import FakeTensorMode
shapes = torch.fx.experimental.symbolic_shapes.ShapeEnv()
with FakeTensorMode(shape_env=shapes) as mode:
    x = mode.from_tensor(torch.zeros(5, 3), static_shapes=False)
    torch._check(x.shape[0] == 5)
    assert (x + 1).shape == (5, 3)
""",
    "a truth that does not hold": """
torch._check(True)
try:
    torch._check(False, lambda: "it does not hold")
except RuntimeError as error:
    assert "it does not hold" in str(error)
from torch.fx.experimental.symbolic_shapes import guard_int, is_nested_int, sym_and, sym_eq, sym_or
assert sym_eq((2, 3), [2, 3]) and not sym_eq((2, 3), (2,)) and sym_eq(3, 3) and not sym_eq(3, 4)
assert sym_and(True) and not sym_and(True, False) and sym_or(False, True) and not sym_or(False)
assert guard_int(7) == 7 and not is_nested_int(7)
assert not _REAL & set(sys.modules)
assert sym_eq(((2,), 3), ((2,), 3))
""",
    "SymPy's version": """
import sympy
assert sympy.__version__[0].isdigit() and "sympy.core" in sys.modules
import torch.fx.experimental.symbolic_shapes as shapes
assert shapes.DimDynamic
""",
    "all of SymPy's names": """
from sympy import *
assert diff(Symbol("x") ** 2) == 2 * Symbol("x") and isinstance(Symbol("x"), Basic)
from torch.fx.experimental.symbolic_shapes import DimDynamic
""",
    "what numbers of SymPy's are": """
from sympy import Basic
import sympy.core.numbers
assert isinstance(sympy.core.numbers.Integer(3), Basic) and not isinstance(3, Basic)
from torch.fx.experimental.symbolic_shapes import DimDynamic
""",
}


@pytest.mark.parametrize("use", _USES)
def test_the_compiler_is_there_for_who_uses_it(use: str) -> None:
    code = _OUTLINED + _USES[use] + 'assert "torch._dynamo.utils" in sys.modules\n'
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=HANGS)


@pytest.mark.parametrize("use", _USES_OF_SHAPES)
def test_symbolic_shapes_and_sympy_are_there_for_who_uses_them(use: str) -> None:
    code = _OUTLINED + _USES_OF_SHAPES[use] + 'assert {"torch.utils._sympy", "sympy.core"} <= set(sys.modules)\n'
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=HANGS)
