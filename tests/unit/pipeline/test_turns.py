import cProfile
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accept_mpi.pipeline.turns import calls_of_shared


def test_calls_are_noted_while_something_else_profiles() -> None:
    """Under ``python -m cProfile`` no run began: Python cannot put back cProfile's own function."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        with calls_of_shared() as found:
            checkpoint(nn.Linear(3, 3), torch.zeros(2, 3), use_reentrant=False)
        torch.zeros(1).abs()
    finally:
        profiler.disable()
    assert found
    assert any("'abs'" in str(one.code) for one in profiler.getstats())
    assert sys.getprofile() is None
