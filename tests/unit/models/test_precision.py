"""Forwards under autocast learn the types of tensors that they will have in training while they are recorded, too."""

import threading
from collections.abc import Callable

import pytest
import torch
from recorded_models import Parts
from torch import nn
from torch.nn import functional as F

from accept_mpi.models.recording.recorded import RecordedModel

Step = Callable[["Net", torch.Tensor], torch.Tensor]


def _masked(net: "Net", x: torch.Tensor) -> torch.Tensor:
    scores = x @ x.transpose(1, 2)
    return (scores + torch.full((5, 5), torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)).softmax(-1) @ x


def _summed(net: "Net", x: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(5, 8, dtype=x.dtype)
    return torch.stack([found.index_add(0, torch.arange(5), row) for row in x])


def _asking(net: "Net", x: torch.Tensor) -> torch.Tensor:
    x = x * 2 if x.dtype == torch.bfloat16 else x * 3
    return x * 5 if torch.is_autocast_enabled("cpu") else x


def _apart(net: "Net", x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        found = x.float() @ net.middle.weight
        return found.to(net.middle(found).dtype) * (2 if found.dtype == torch.float32 else 1)


STEPS: dict[str, Step] = {
    "masked": _masked,
    "summed": _summed,
    "asking": _asking,
    "apart": _apart,
    "back": lambda net, x: net.middle(x.float().square()).to(x.dtype),
    "attention": lambda net, x: net.attention(x, x, x)[0],
    "fused": lambda net, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0],
    "mixed": lambda net, x: F.scaled_dot_product_attention(x[:, None].float(), x[:, None].float(), x[:, None])[:, 0],
    "function": lambda net, x: F.conv1d(x.transpose(1, 2), net.convolution.weight, net.convolution.bias).transpose(1, 2),
    "convolution": lambda net, x: net.convolution(x.transpose(1, 2)).transpose(1, 2),
    "recurrent": lambda net, x: net.recurrent(x)[0],
    "gated": lambda net, x: net.gated(x)[0],
    "cell": lambda net, x: torch.stack([net.cell(part) for part in x]),
    "normed": lambda net, x: net.norm(x) + F.layer_norm(x, (8,)),
    "product": lambda net, x: torch.einsum("btd,bsd->bts", x, x) @ x + x.prod(-1, keepdim=True),
    "spectrum": lambda net, x: torch.fft.irfft(torch.fft.rfft(x) * torch.arange(5), n=8),
    "block": lambda net, x: net.choosing(x),
}


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if x.mean() > 0 else self.other(x)


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.convolution, self.cell = nn.Conv1d(8, 8, 3, padding=1), nn.GRUCell(8, 8)
        self.recurrent, self.gated = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.choosing, self.step = Choosing(), STEPS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.step(self, self.first(x))
        return self.last(x * (2 if x.dtype == torch.bfloat16 else 3))


@pytest.mark.parametrize("name", STEPS)
def test_types_are_those_of_training(name: str) -> None:
    """Types were those of single precision: masks, sums and choices were others than in a plain loop under autocast."""

    def make() -> Net:
        torch.manual_seed(7)
        return Net(name)

    value = torch.randn(2, 5, 8)
    chain = RecordedModel(make, value, "", autocast=True).chain()
    assert chain.undivided == (["choosing"] if name == "block" else [])
    with torch.autocast("cpu", torch.bfloat16):
        plain = make()
        expected = plain(value)
        expected.float().square().mean().backward()
        for cuts in ([], list(range(1, len(chain)))):
            parts = Parts(chain, cuts)
            found = parts.train(value, lambda result: result.float().square().mean())
            assert torch.equal(parts.forward(value)[0], expected)
            assert found == expected.float().square().mean()


class OwnPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)
            x = torch.zeros(len(x), 8, dtype=x.dtype).index_add(0, torch.arange(len(x)), x)
        return self.last(x.float())


class BesideOthers(OwnPrecision):
    """Another thread, such as a lane, begins to compute in lower precision meanwhile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        other = threading.Thread(target=torch.autocast("cpu", torch.bfloat16).__enter__)
        other.start()
        other.join()
        return self.last(torch.tanh(x))


@pytest.mark.parametrize("kind", [OwnPrecision, BesideOthers])
def test_a_context_of_the_forward_itself(kind: type[OwnPrecision]) -> None:
    """It was refused: index_add of two types; and one of another thread counted as the forward's."""

    def make() -> OwnPrecision:
        torch.manual_seed(7)
        return kind()

    value = torch.randn(4, 8)
    chain = RecordedModel(make, value, "").chain()
    assert torch.equal(Parts(chain, [1]).forward(value)[0], make()(value))
