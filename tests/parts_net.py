"""A model whose layers pass on parts of larger tensors: their strides have gaps, and so have those of the gradients."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

Parts = tuple[torch.Tensor, ...]


class Divide(nn.Module):
    """One tensor in three parts of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 30)

    def forward(self, x: torch.Tensor) -> Parts:
        return self.linear(x).chunk(3, dim=1)


class Each(nn.Module):
    """A norm of each part, in which sums go over the samples; the first part of a part is passed by."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(10) for _ in range(3))
        self.linear = nn.Linear(10, 10)

    def forward(self, parts: Parts) -> Parts:
        a, b, c = (norm(part) for norm, part in zip(self.norms, parts, strict=True))
        return torch.relu(self.linear(a)), b[:, ::2], c


class Join(nn.Module):
    def forward(self, parts: Parts) -> torch.Tensor:
        return torch.cat(parts, dim=1)


class Biased(nn.Module):
    """Biases whose gradients are sums over what ``Join`` gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(10, 10), nn.Linear(5, 5), nn.Linear(10, 10)])

    def forward(self, parts: Parts) -> Parts:
        return tuple(linear(part) for linear, part in zip(self.linears, parts, strict=True))


def model() -> nn.Sequential:
    return nn.Sequential(Divide(), Each(), Biased(), Join(), nn.Linear(25, 5))


def data() -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(96, 12, generator=generator), torch.randint(5, (96,), generator=generator)
    return TensorDataset(x, y), TensorDataset(x[:8], y[:8])
