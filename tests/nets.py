"""Models, data sets and losses as users have them: "nets:NAME" in a job file. Small, and odd in one way each."""

import dataclasses
import os
import random
from collections import OrderedDict, namedtuple
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

N = 32


def pairs() -> tuple[TensorDataset, TensorDataset]:
    """Six numbers and a class of three."""
    x = torch.randn(N, 6)
    return TensorDataset(x, x[:, :3].argmax(1)), TensorDataset(x, x[:, :3].argmax(1))


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def of_dtype(dtype: str) -> nn.Sequential:
    """Classes of digits, in layers that compute in this precision."""
    kind = getattr(torch, dtype)
    inside = nn.Sequential(nn.Linear(192, 32, dtype=kind), nn.Tanh(), nn.Linear(32, 10, dtype=kind))
    return nn.Sequential(nn.Flatten(), Cast(kind), inside, Cast(torch.float32))


# -- modes, versions of weights, hooks -------------------------------------------------------------------------------------


def frozen_norm() -> nn.Sequential:
    """A pretrained norm in eval mode below layers that train."""
    norm = nn.BatchNorm1d(6)
    norm.running_mean += 1.0
    norm.requires_grad_(False).eval()
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(norm, nn.Dropout(0.2)), nn.ReLU(), nn.Linear(6, 3))


class Recomputed(nn.Module):
    def __init__(self, mode: str, n: int, m: int) -> None:
        super().__init__()
        self.mode, self.inside = mode, nn.Sequential(nn.Linear(n, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, m))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "no" or not self.training:
            return self.inside(x)
        if self.mode == "reentrant" and not x.requires_grad:
            x = x.detach().requires_grad_()
        return checkpoint(self.inside, x, use_reentrant=self.mode == "reentrant")


def recomputed(mode: str) -> nn.Sequential:
    return nn.Sequential(Recomputed(mode, 6, 6), Recomputed(mode, 6, 6), Recomputed(mode, 6, 3))


class Writing(nn.Linear):
    """Writes into its own weight in forward. idempotent: a second time changes nothing; twice as small: each time."""

    def __init__(self, how: str, n: int, m: int) -> None:
        super().__init__(n, m)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if not self.training:
                pass
            elif self.how == "clamp":
                self.weight.clamp_(-0.2, 0.2)
            elif self.how == "data":
                self.weight.data.clamp_(-0.2, 0.2)
            elif self.how == "new data":
                self.weight.data = self.weight.data.clamp(-0.2, 0.2)
            elif self.how == "shrink":
                self.weight.mul_(0.95)
        return super().forward(x)


def writing(how: str) -> nn.Sequential:
    return nn.Sequential(Writing(how, 6, 6), nn.Tanh(), Writing(how, 6, 6), nn.Tanh(), nn.Linear(6, 3))


def _clipped(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.05, 0.05)


def hooked(how: str) -> list[Any]:
    """Rows that stay, by hooks on parameters; hooks that know the module or the parameter."""

    def one(n: int, m: int) -> nn.Linear:
        linear = nn.Linear(n, m)
        mask = torch.ones(m, 1)
        mask[::2] = 0
        if how in ("built", "functions"):
            linear.weight.register_hook(lambda gradient: gradient * mask)
        elif how == "module":  # what the weight is at that moment
            linear.weight.register_hook(lambda gradient: gradient + 0.1 * linear.weight.detach())
        elif how == "parameter":
            weight = linear.weight
            weight.register_hook(lambda gradient: gradient + 0.1 * weight.detach())
        elif how == "accumulated":
            linear.weight.register_post_accumulate_grad_hook(_clipped)
        elif how == "forward":
            linear.register_forward_hook(lambda module, inputs, output: output * 0.5 + module.bias.detach())
        elif how == "backward":
            linear.register_full_backward_hook(lambda m, inputs, _: tuple(g if g is None else 0.5 * g for g in inputs))
        return linear

    if how == "functions":
        return [lambda: one(6, 6), nn.Tanh(), lambda: one(6, 6), nn.Tanh(), lambda: one(6, 3)]
    return [one(6, 6), nn.Tanh(), one(6, 6), nn.Tanh(), one(6, 3)]


class Twice(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.part = nn.Linear(6, 6) if kind == "linear" else nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "linear":
            return self.part(self.part(x))
        return self.part(self.part(x.unsqueeze(1))).squeeze(1)


def twice(kind: str) -> nn.Sequential:
    return nn.Sequential(Twice(kind), Twice(kind), nn.Linear(6, 3))


def normed(kind: str) -> Any:
    new = {"new": nn.utils.parametrizations.weight_norm, "spectral": nn.utils.parametrizations.spectral_norm}
    norm = new.get(kind) or {"old spectral": nn.utils.spectral_norm}.get(kind, nn.utils.weight_norm)
    if kind == "functions":
        return [lambda: norm(nn.Linear(6, 6)), nn.ReLU(), lambda: norm(nn.Linear(6, 3))]
    return nn.Sequential(norm(nn.Linear(6, 6)), nn.ReLU(), norm(nn.Linear(6, 3)))


# -- what a first forward does ---------------------------------------------------------------------------------------------


class Cached(nn.Module):
    """Makes a table when it first sees a length."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(6, 6)
        if kind in ("none", "transient"):
            self.register_buffer("table", None, persistent=kind == "none")
        if kind == "replaced":
            self.register_buffer("table", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "made":
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.linspace(0.5, 1.5, x.shape[1]))
        elif self.table is None or self.table.numel() < x.shape[1]:
            self.table = torch.linspace(0.5, 1.5, x.shape[1])
        return self.linear(x) * self.table


class Warming(nn.Module):
    """Counts its forwards, and is another function in the first ones; keeps the count in its state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.calls = kind, nn.Linear(6, 6), 0
        if kind == "buffer":
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            if self.kind == "buffer":
                self.count += 1
        return self.linear(x) * min(1.0, 0.1 * self.calls)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "more": (1.5, None, [torch.full((2,), float(self.calls))], {3: "x"})}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]
        assert state["more"][2][0].tolist() == 2 * [float(self.calls)]


def first_seen(kind: str) -> nn.Sequential:
    odd = Warming(kind) if kind in ("attribute", "buffer") else Cached(kind)
    return nn.Sequential(nn.Linear(6, 6), odd, nn.ReLU(), nn.Linear(6, 3))


class Odd:
    """Of no use in a checkpoint."""


class Unkept(nn.Linear):
    def get_extra_state(self) -> Any:
        return Odd()

    def set_extra_state(self, state: Any) -> None:
        pass


def unkept() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Unkept(6, 3))


# -- what layers hand on ---------------------------------------------------------------------------------------------------

Point = namedtuple("Point", ["a", "b"])


@dataclasses.dataclass
class Record:
    a: torch.Tensor
    b: Any


class First(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.cells, self.calls = kind, nn.Linear(6, 6), nn.LSTM(6, 6, batch_first=True), 0

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x)
        self.calls += self.training
        two = torch.full((len(x), 1), 2.0)
        return {
            "dict": lambda: {"h": h, "scale": two},
            "ordered": lambda: OrderedDict(scale=two, h=h),
            "none": lambda: (h, None),
            "flag": lambda: (h, True),
            "varying": lambda: (h, self.calls % 3),
            "sometimes": lambda: (h, two if self.calls % 2 else None),
            "cells": lambda: self.cells(h.unsqueeze(1)),
            "point": lambda: Point(h, {"s": [two, 3]}),
            "record": lambda: Record(h, ("x", two)),
            "same": lambda: [h, h],
            "array": lambda: (h, np.arange(6, dtype=np.float32), np.float32(2)),
            "lone": lambda: (h,),
            "no gradient": lambda: (h.detach() if self.calls % 2 else h, two),
        }[self.kind]()


class Second(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(6, 3)

    def forward(self, v: Any) -> torch.Tensor:
        return self.linear(
            {
                "dict": lambda: v["h"] * v["scale"],
                "ordered": lambda: list(v.values())[1] * next(iter(v.values())),
                "none": lambda: v[0] if v[1] is None else 0 * v[0],
                "flag": lambda: 2 * v[0] if v[1] is True else 0 * v[0],
                "varying": lambda: v[0] * (1 + v[1]),
                "sometimes": lambda: v[0] if v[1] is None else v[0] * v[1],
                "cells": lambda: v[0][:, 0] + v[1][0][0] + v[1][1][0],
                "point": lambda: v.a * v.b["s"][0] * v.b["s"][1],
                "record": lambda: v.a * v.b[1] if v.b[0] == "x" else 0 * v.a,
                "same": lambda: v[0] + v[1].tanh() if v[0] is v[1] else 0 * v[0],
                "array": lambda: v[0] * torch.from_numpy(v[1]) * v[2].item(),
                "lone": lambda: v[0] if isinstance(v, tuple) else 0 * v,
                "no gradient": lambda: v[0] * v[1],
            }[self.kind]()
        )


def handing(kind: str) -> nn.Sequential:
    return nn.Sequential(First(kind), Second(kind))


class Gone(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, Odd()


class Taken(nn.Module):
    def forward(self, v: Any) -> torch.Tensor:
        return v[0]


def unknown() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 3), Gone(), Taken())


class Heads(nn.Module):
    """Gives more than one thing; the loss wants all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": self.one(x), "aux": [self.two(x)]}


def heads() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Heads())


def both(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output["logits"], target) + output["aux"][0].pow(2).mean()


# -- sequences, lengths, padding -------------------------------------------------------------------------------------------


def tokens() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 20))


class Padded:
    """Pads to the longest of the micro-batch."""

    def __init__(self) -> None:
        self.rows = [torch.randint(0, 20, (3 + (5 * i) % 11,)) for i in range(N)]

    def __len__(self) -> int:
        return N

    def _pad(self, indices: Any, value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([self.rows[i] for i in indices], batch_first=True, padding_value=value)

    def inputs(self, indices: Any, seed: int | None = None) -> torch.Tensor:
        return self._pad(indices, 0)

    def targets(self, indices: Any) -> torch.Tensor:
        return self._pad(indices, -100)


def padded() -> tuple[Padded, Padded]:
    return Padded(), Padded()


def ignored(empty: bool = False, easy: bool = False) -> tuple[TensorDataset, TensorDataset]:
    """Sequences of six of which one to six count. empty: every other sample is padding alone. easy: to be repeated."""
    x = torch.randint(0, 20, (N, 6))
    y = x.clone() if easy else torch.roll(x, -1, 1)
    for row in range(N):
        y[row, 1 + row % 6 :] = -100
        if empty and row % 2:
            y[row] = -100
    return TensorDataset(x, y), TensorDataset(x, y)


def sums(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the built-in loss computes, as a user may write it."""
    flat, wanted = output.reshape(-1, 20), target.reshape(-1)
    return nn.functional.cross_entropy(flat, wanted, reduction="sum"), (wanted != -100).sum()


def weighted_classes() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]), ignore_index=1)


class Masked(Dataset):
    """Targets are a tuple: values, and how much each counts."""

    def __init__(self) -> None:
        self.x, self.y, self.mask = torch.randn(N, 6), torch.randn(N, 3), torch.rand(N, 3) < 0.4

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.x[i], (self.y[i], self.mask[i].float())


def masked() -> tuple[Masked, Masked]:
    return Masked(), Masked()


def masked_loss(output: torch.Tensor, target: Any) -> tuple[torch.Tensor, float]:
    y, mask = target
    return ((output - y).pow(2) * mask).sum(), float(mask.sum())


# -- random numbers --------------------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Noise of torch's, NumPy's and Python's, in evaluation, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.from_numpy(np.random.rand(*x.shape).astype(np.float32)) + torch.rand_like(x)
        return x + 0.1 * noise * random.random()


def drawing() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Drawing(), nn.Linear(6, 6), Drawing(), nn.Linear(6, 3))


class Mirrored(Dataset):
    """Random mirroring that concerns x and y alike."""

    def __init__(self, rng: str) -> None:
        self.rng, self.own = rng, np.random.default_rng(torch.initial_seed() if rng == "own" else None)
        self.x = torch.rand(N, 6) + 0.5

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        draw = {
            "torch": lambda: torch.rand(()).item(),
            "numpy": np.random.rand,
            "python": random.random,
            "unseeded": self.own.random,
        }[self.rng]()
        return (self.x[i], 1) if draw < 0.5 else (-self.x[i], 0)


def mirrored(rng: str) -> tuple[Mirrored, Mirrored]:
    return Mirrored(rng), Mirrored(rng)


# -- what is not in a layer's parameters and buffers ------------------------------------------------------------------------

_TABLES: dict[int, torch.Tensor] = {}
_forwards = 0


class Merging(nn.Linear):
    """Another function in evaluation, which it changes to and from when its mode changes."""

    merged = False

    def train(self, mode: bool = True) -> "Merging":
        self.merged = not mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if self.merged else 1.0)


class Keeping(nn.Module):
    """Hands on what it goes on to change: a buffer, an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.mean = kind, torch.zeros(6)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.count += 1
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x, (self.count if self.kind == "buffer" else self.mean)


class Asking(nn.Module):
    """Uses a module, or its weights, otherwise than by one call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.one, self.two = kind, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.one, self.two
        if self.kind == "functional":
            return (
                torch.func.functional_call(one, {"weight": two.weight.tanh(), "bias": two.bias * 2}, (x,)) + one.weight.sum()
            )
        if self.kind == "mapped":
            return torch.vmap(lambda row: one(row))(x)
        if self.kind == "beside":
            return one(x) + 0.1 * nn.functional.linear(x, one.weight)
        with torch.enable_grad():
            z = x if x.requires_grad else x.detach().requires_grad_()
            of = one.weight if self.kind == "of weights" else z
            (found,) = torch.autograd.grad(two(one(z).tanh()).sum(), of, create_graph=self.kind == "gradient")
        return x + found.mean()


def _times(x: torch.Tensor, kind: str) -> torch.Tensor:
    global _forwards
    if kind == "table":
        return x * _TABLES.setdefault(x.shape[1], torch.linspace(0.5, 1.5, x.shape[1]))
    _forwards += 1
    return x * (1 + 0.01 * _forwards)


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def _counting() -> nn.Linear:
    linear, calls = nn.Linear(6, 6), [0]

    def count(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls[0] += module.training
        return output * (1 + 0.01 * calls[0])

    linear.register_forward_hook(count)
    return linear


class Knowing(nn.Module):
    """Has functions, in an attribute and in a hook, that know it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.norm, self.scale, self.seen = norm, nn.Parameter(torch.full((6,), 0.7)), {}
        self.function = lambda x: norm(x) * self.scale
        self.linear.register_forward_hook(lambda module, x, output: self.seen.update(linear=output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)) + self.seen["linear"]


def outside(kind: str) -> nn.Sequential:
    if kind in ("buffer", "attribute"):
        odd: list[nn.Module] = [Keeping(kind), Applied(lambda v: v[0] * (1 + 0.1 * v[1]))]
    elif kind == "conjugate":
        odd = [Applied(lambda x: torch.complex(x, 2 * x).conj()), Applied(lambda x: x.imag)]
    elif kind in ("functional", "mapped", "beside", "gradient", "of weights"):
        odd = [Asking(kind), nn.Tanh(), Asking(kind)]
    elif kind == "knowing":
        odd = [Knowing(), nn.Tanh(), Knowing()]
    elif kind in ("table", "global"):
        odd = [nn.Identity(), nn.Identity(), Applied(lambda x: _times(x, kind))]
    else:
        odd = [Merging(6, 6), nn.Tanh(), Merging(6, 6)] if kind == "merging" else [_counting(), nn.Tanh(), _counting()]
    return nn.Sequential(nn.Linear(6, 6), *odd, nn.Linear(6, 3))


# -- bugs ------------------------------------------------------------------------------------------------------------------


class Buggy(nn.Module):
    """A bug some functions deep, that shows itself late."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.linear = kind, 0, nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.linear(self._deeper(x) if self.calls > 6 else x)
        if self.kind == "backward" and self.calls > 6:
            out.register_hook(lambda gradient: gradient / self._look_up(gradient, None))
        return out

    def _deeper(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.kind == "backward" else self._look_up(x, None)

    def _look_up(self, x: torch.Tensor, table: Any) -> torch.Tensor:
        if self.kind == "memory":
            return x + torch.empty(1 << 50)
        return x * table.scale


def buggy(kind: str = "forward") -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Buggy(kind) if kind in ("forward", "memory", "backward") else nn.Linear(6, 3))


_judged = 0


def buggy_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    global _judged
    _judged += 1
    if _judged > 6:
        raise KeyError("no such class")
    return nn.functional.cross_entropy(output, target)


class BuggyData(Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(N, 6)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self._read(i), 0

    def _read(self, i: int) -> torch.Tensor:
        if i == N - 1:
            raise OSError("a scratch on the disk")
        return self.x[i]


def buggy_data() -> tuple[BuggyData, TensorDataset]:
    return BuggyData(), pairs()[1]


class Hungry(nn.Module):
    """A fourth one of these in a row does not fit into rank 1's memory."""

    run: list["Hungry"] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not x.is_meta and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            if self in Hungry.run:
                Hungry.run.clear()
            Hungry.run.append(self)
            if len(Hungry.run) > 3:
                torch.empty(1 << 50)
        work = torch.eye(160)
        for _ in range(20):  # enough for two ranks
            work = work @ work
        return self.linear(x).tanh() * work[0, 0]


def hungry() -> list[nn.Module]:
    return [*(Hungry() for _ in range(8)), nn.Linear(6, 3)]


# -- parameters that a layer or a loss uses though it has none of them -----------------------------------------------------

_LAST: list[nn.Module] = []
_ELSEWHERE = nn.Parameter(torch.ones(6, 6))


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


def referring(kind: str) -> nn.Sequential:
    """A layer that uses the weights of another one, which it holds in some way, or of none."""
    first = nn.Linear(6, 6)
    weight, last = first.weight.t(), Applied(None)
    if kind == "attribute":
        last.weight, last.function = weight, lambda x: x @ last.weight
    elif kind == "list":
        last.weights, last.function = [first.weight], lambda x: x @ last.weights[0].t()
    elif kind == "given":
        last.function = partial(_product, weight=weight)
    elif kind == "module":
        last.function = lambda x: x @ first.weight.t()
    else:
        seen = {"view": weight, "values": weight.detach(), "elsewhere": _ELSEWHERE}[kind]
        last.function = lambda x: x @ seen
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), last, nn.Linear(6, 3))
    _LAST[:] = [model]
    return model


def penalty(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that looks at the model's weights."""
    return nn.functional.cross_entropy(output, target) + 0.1 * sum((p**2).sum() for p in _LAST[0].parameters())


class Slope(nn.Module):
    """The derivative of something by a tensor on which more of what the layer is given may depend."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, given: Any) -> torch.Tensor:
        x, y = given
        if not x.requires_grad:  # in evaluation
            return self.out(x)
        (found,) = torch.autograd.grad((x * y).sum(), x, create_graph=True)
        return self.out(found)


def differentiating() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Applied(lambda x: (x, x.sin())), Slope())
