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
assert "torch._dynamo.utils" not in sys.modules
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


@pytest.mark.parametrize("use", _USES)
def test_the_compiler_is_there_for_who_uses_it(use: str) -> None:
    code = _OUTLINED + _USES[use] + 'assert "torch._dynamo.utils" in sys.modules\n'
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=HANGS)
