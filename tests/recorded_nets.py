"""Models with forwards of their own, and data sets for them."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


class Block(nn.Module):
    def __init__(self, given: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(given, out, 3, padding=1)
        self.norm = nn.BatchNorm2d(out)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Skips that pass over most of the model, by concatenation."""

    def __init__(self, out: int = 2) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(3, 8), Block(8, 12), Block(12, 16)])
        self.up = nn.ModuleList([Block(28, 12), Block(20, 8)])
        self.head = nn.Conv2d(8, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for n, block in enumerate(self.down):
            x = block(x if n == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, kept.pop()], dim=1))
        return self.head(x)


class Language(nn.Module):
    """Tied words, masks and positions made from the inputs, keyword arguments, a dict as the result, its own loss."""

    def __init__(self, width: int = 16, words: int = 20, blocks: int = 3, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 12, width))
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width), "norm": nn.LayerNorm(width)})
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.dropout = dropout

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, *, labels: torch.Tensor | None = None
    ) -> dict[str, Any]:
        count = ids.shape[1]
        allowed = torch.ones(count, count, dtype=torch.bool, device=ids.device).tril()[None]
        if mask is not None:
            allowed = allowed & mask[:, None, :].bool()
        bias = torch.zeros(allowed.shape, device=ids.device).masked_fill(~allowed, torch.finfo(torch.float32).min)
        x = self.words(ids) + self.positions[:, :count]
        for block in self.blocks:
            q, k, v = block["qkv"](block["norm"](x)).chunk(3, dim=-1)
            weights = F.softmax(q @ k.transpose(1, 2) * self.scale + bias, dim=-1)
            x = x + F.dropout(block["out"](weights @ v), self.dropout, self.training)
        logits = self.head(x)
        found = {"logits": logits, "hidden": x}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return found


class Sentences:
    """Samples that are dicts, with masks of padding."""

    def __init__(self, count: int, masked: bool = True) -> None:
        draw = torch.Generator().manual_seed(count)
        self.ids = torch.randint(20, (count, 12), generator=draw)
        self.mask = (torch.arange(12) < torch.randint(6, 13, (count, 1), generator=draw)).long()
        self.masked = masked

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = {"ids": self.ids[index], "labels": self.ids[index].roll(-1)}
        return sample | ({"mask": self.mask[index]} if self.masked else {})


def sentences(masked: bool = True) -> tuple[Sentences, Sentences]:
    return Sentences(22, masked), Sentences(9, masked)


def pictures() -> tuple[TensorDataset, TensorDataset]:
    """Images, with an image as the target."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(22, 3, 16, 16, generator=draw)
    return TensorDataset(x, x[:, :2].tanh()), TensorDataset(x[:9], x[:9, :2].tanh())


def unet() -> UNet:
    return UNet()


def language(**args: Any) -> Language:
    return Language(**args)


def certainty(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """Mean of the highest probabilities."""
    return output["logits"].softmax(-1).amax(-1).mean()


class Sorting(nn.Module):
    """Sorts sentences into three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.words(ids)).mean(1))


def sorting() -> Sorting:
    return Sorting()


def sorted_sentences() -> tuple[TensorDataset, TensorDataset]:
    return tuple(TensorDataset(one.ids, one.ids[:, 0] % 3) for one in sentences())  # type: ignore[return-value]


class Pictured(nn.Module):
    """Classes of images."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = Block(3, 8), Block(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        return self.head((x + self.two(x)).mean((2, 3)))


def pictured() -> Pictured:
    return Pictured()


def classified() -> tuple[TensorDataset, TensorDataset]:
    """Images and their classes."""
    draw = torch.Generator().manual_seed(4)
    x, y = torch.randn(22, 3, 16, 16, generator=draw), torch.randint(4, (22,), generator=draw)
    return TensorDataset(x, y), TensorDataset(x[:9], y[:9])


def plain_sentences() -> tuple[TensorDataset, TensorDataset]:
    """Words, and the words that follow."""
    return tuple(TensorDataset(one.ids, one.ids.roll(-1, 1)) for one in sentences())  # type: ignore[return-value]


class Experts(nn.Module):
    """A block that sends each token to one of its experts, as the values say; some experts get none."""

    def __init__(self, width: int, experts: int, dropout: float, counts: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout)) for _ in range(experts))
        self.register_buffer("sent", torch.zeros(experts) if counts else None)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for n, expert in enumerate(self.experts):
            rows = (chosen == n).nonzero().squeeze(1)
            if len(rows):
                out.index_add_(0, rows, scale * weights[rows, None] * expert(tokens[rows]))
            if self.training and self.sent is not None:
                self.sent[n] += len(rows)
        return x + out.view(x.shape), weights.mean()


class Mixture(nn.Module):
    """Mixture of experts: without ``model.blocks`` its forward cannot be recorded."""

    def __init__(self, width: int = 8, layers: int = 3, experts: int = 3, dropout: float = 0.1, counts: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 16 * 16, width)
        self.layers = nn.ModuleList(Experts(width, experts, dropout, counts) for _ in range(layers))
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        kept = 0.0
        for layer in self.layers:
            x, weight = layer(x, scale=0.5)
            kept = kept + weight
        return self.last(x) * kept


def mixture(**args: Any) -> Mixture:
    return Mixture(**args)


class Choice(nn.Module):
    """Takes one sample by another way than several."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.shape[0] > 1 else self.b(x)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i, self.x, self.o = nn.Linear(6, 16), Choice(), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(torch.relu(self.x(torch.relu(self.i(x)))))


def choosing() -> nn.Module:
    return Choosing()


def few() -> tuple[TensorDataset, TensorDataset]:
    """22 samples: an epoch's last batch has four, its last micro-batch one."""
    x = torch.randn(31, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    return TensorDataset(x[:22], y[:22]), TensorDataset(x[22:], y[22:])


class Listing(nn.Module):
    """Keeps its blocks in a list of Python's, and their parameters in one of torch's that has the name of a method (N-BEATS
    as published)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [[nn.Linear(6, 6), nn.Linear(6, 3)] for _ in range(2)]
        every = [p for block in self.blocks for part in block for p in part.parameters()]
        self.blocks.append(self.blocks[0])  # tied
        self.parameters = nn.ParameterList(every)  # type: ignore[method-assign, assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x.new_zeros(len(x), 3)
        for back, ahead in self.blocks:
            found = found + ahead(torch.tanh(x))
            x = x - torch.relu(back(x))
        return found


def listing() -> Listing:
    return Listing()


def frozen(head: bool) -> nn.Sequential:
    """Layers that are not trained, but perhaps the last one."""
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).requires_grad_(False)
    net[2].requires_grad_(head)
    return net
