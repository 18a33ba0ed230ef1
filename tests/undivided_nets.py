"""Models of which no forward can be recorded, and data for them."""

import random
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset


class Branching(nn.Module):
    """Leaves a layer out of some micro-batches, whose values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.one(x))
        if x.mean() > 0:
            h = torch.tanh(self.norm(self.two(h)))
        return self.head(h)


class Packing(nn.Module):
    """Classifies sentences of any lengths, as tutorials do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        packed = pack_padded_sequence(self.words(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return {"hidden": out, "logits": self.head(out.max(1).values)}


class Encoder(nn.Module):
    """A part whose result is as long as the longest sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = pack_padded_sequence(self.words(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, (state, _) = self.lstm(packed)
        return pad_packed_sequence(out, batch_first=True)[0], state[-1]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.query, self.head = Encoder(), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        out, state = self.encoder(ids, lengths)
        weights = (out * self.query(state)[:, None]).sum(-1).softmax(1)
        return self.head((weights[..., None] * out).sum(1))


class Dropping(nn.Module):
    """Leaves out layers at random (stochastic depth), as Python's numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            if not self.training or random.random() < 0.5:
                x = x + torch.tanh(layer(x))
        return self.last(nn.functional.dropout(x, 0.2, self.training))


class Carrying(nn.Module):
    """Goes on with the state in which the last micro-batch has left it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)
        self.hidden = torch.zeros(1, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.cell(x, self.hidden.expand(len(x), 8))
        if self.training:
            self.calls += 1
            self.hidden = hidden.detach().mean(0, keepdim=True) / (1 + self.calls % 2)
        return self.head(hidden)


class Mapped(nn.Module):
    """Scales each sample by a transform of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.vmap(lambda row: row / (1 + row.abs().sum()))(x)
        return self.head(torch.tanh(self.one(x)))


class Recursing(nn.Module):
    """Calls itself, with more arguments than the data set gives, and uses its whole result."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, deeper: int = 2) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.one(x))
        if deeper and hidden.abs().max() > 0:
            return self(hidden, deeper - 1) | {"hidden": hidden}
        return {"logits": self.head(hidden), "hidden": hidden}


class Scored(nn.Module):
    """Computes its loss from the targets that it takes for sure."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(torch.tanh(self.one(x)))
        sure = logits.detach().softmax(1).max(1).values > 0.1
        if labels is None or not sure.any():
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits[sure], labels[sure]), "logits": logits}


def rows() -> tuple[TensorDataset, TensorDataset]:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    return TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])


class _Dicts:
    def __init__(self, *columns: tuple[str, torch.Tensor]) -> None:
        self._columns = dict(columns)

    def __len__(self) -> int:
        return len(self._columns["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


def sentences() -> tuple[_Dicts, _Dicts]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 10, (40,), generator=generator)
    ids = torch.randint(1, 20, (40, 9), generator=generator) * (torch.arange(9) < lengths[:, None])
    y = ids.max(1).values % 3
    every = ("ids", ids), ("lengths", lengths), ("labels", y)
    return _Dicts(*((name, value[:32]) for name, value in every)), _Dicts(*((name, value[32:]) for name, value in every))


def labelled() -> tuple[_Dicts, _Dicts]:
    found = []
    for part in rows():
        x, y = part.tensors
        found.append(_Dicts(("x", x), ("labels", y)))
    return found[0], found[1]
