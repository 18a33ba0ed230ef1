"""A forward is recorded for a new shape while other threads, such as lanes, compute."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from recorded_models import recorded
from torch import nn

from accept_mpi.models.recording.meta_model import MetaModel
from accept_mpi.pipeline.turns import Turns
from accept_mpi.seeds import seed_torch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def test_nobody_draws_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of random numbers is put back after a record, and was in the middle of what another thread drew."""
    chain = recorded(Net, torch.randn(2, 4))
    layer, longer = chain.build_range(0, len(chain), 0)[0], torch.randn(3, 4)
    began, go, plain = threading.Event(), threading.Event(), MetaModel.mode

    @contextmanager
    def mode(self: MetaModel, *given: Any) -> Iterator[None]:
        began.set()
        go.wait(1)
        with plain(self, *given):
            yield

    monkeypatch.setattr(MetaModel, "mode", mode)
    other = threading.Thread(target=layer, args=(longer,))
    other.start()
    began.wait(5)
    with Turns().drawing():
        seed_torch(1)
        drawn = [torch.rand(2)]
        go.set()
        other.join(5)
        drawn.append(torch.rand(2))
    torch.manual_seed(1)
    assert torch.equal(torch.stack(drawn), torch.rand(2, 2))
