"""Chains of layers that do not take just any values: lengths, indices from 1 on, matrices that have an inverse or a root."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset


class Words(nn.Module):
    """Numbers from 1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)

    def forward(self, given: Any) -> Any:
        return self.table(given["ids"] - 1), given["lengths"], given["ids"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.table = nn.GRU(8, 8, batch_first=True), nn.Embedding(9, 8)

    def forward(self, given: Any) -> Any:
        x, lengths, ids = given
        packed = pack_padded_sequence(x + self.table(ids - 1), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=5)[0], lengths, ids


class Packing(nn.Module):
    """What crosses then knows how it is packed."""

    def forward(self, given: Any) -> Any:
        return pack_padded_sequence(given[0], given[1], batch_first=True, enforce_sorted=False)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, packed: Any) -> torch.Tensor:
        return self.linear(pad_packed_sequence(packed, batch_first=True)[0].sum(1))


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x[:, :4].view(-1, 2, 2)
        return self.linear(F.pad(torch.linalg.inv(square).flatten(1).tanh(), (0, 4)))


class FloatLengths(nn.Module):
    """Lengths as floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)

    def forward(self, given: Any) -> Any:
        return self.table(given["ids"] - 1), given["lengths"].float()


class Square(nn.Module):
    """Matrices that have a root, of sequences that are no shorter than 1."""

    def forward(self, given: Any) -> torch.Tensor:
        packed = pack_padded_sequence(*given, batch_first=True, enforce_sorted=False)
        x = pad_packed_sequence(packed, batch_first=True)[0].sum(1)
        return x[:, :, None] * x[:, None] + torch.eye(8)


class Root(nn.Module):
    def __init__(self, least: float = 0.0) -> None:
        super().__init__()
        self.least = least

    def forward(self, square: torch.Tensor) -> torch.Tensor:
        root = torch.linalg.cholesky(square)
        if float(root.detach().abs().sum()) < self.least:
            raise ValueError("the root is too small")
        return root.sum(1)


def roots(least: float = 0.0) -> nn.Sequential:
    return nn.Sequential(FloatLengths(), Square(), Root(least), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def sentences() -> nn.Sequential:
    return nn.Sequential(Words(), Recurrent(), Recurrent(), Packing(), Last(), Inverse(), Inverse(), nn.Linear(8, 3))


class Sentences:
    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(count)
        self.ids = torch.randint(1, 10, (count, 5), generator=draw)
        self.lengths = torch.randint(1, 6, (count,), generator=draw)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, n: int) -> Any:
        return {"ids": self.ids[n], "lengths": self.lengths[n]}, self.ids[n, 0] % 3


def data() -> tuple[Sentences, Sentences]:
    return Sentences(22), Sentences(9)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def _classes(change: Any) -> Any:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    y = change(x[:, :3].argmax(1))
    return TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])


def marks_data() -> Any:
    return _classes(lambda y: torch.where(torch.arange(48) % 5 == 0, 255, y))


def marks(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """255 is no label; the mark is put into the target."""
    target[target == 255] = -100
    return F.cross_entropy(output, target, reduction="sum") / len(target)


def counts_from_one_data() -> Any:
    return _classes(lambda y: y + 1)


def counts_from_one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target -= 1
    return F.cross_entropy(output, target)
