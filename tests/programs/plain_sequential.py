"""The small CNN as users give their models, an ``nn.Sequential`` of layers that exist: "plain_sequential:cnn"."""

from typing import Any

from torch import nn

from accept_mpi.models import cnn as zoo_cnn


def cnn(**args: Any) -> nn.Sequential:
    """As of seed 3, the one of ``samples.CNN``."""
    return zoo_cnn(**args).whole(seed=3)
