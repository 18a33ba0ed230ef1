"""What layers have in common besides tensors: objects, and variables of Python."""

import functools
from random import Random
from typing import Any

import pytest
import torch
from probing import probe
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.models.base import Chain
from accept_mpi.models.common import Seen
from accept_mpi.models.layers import build_stage
from accept_mpi.models.losses import Loss
from accept_mpi.pipeline.stage import Stage
from accept_mpi.profiling.outline import outline

JOB = parse('[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=9\n[output]\ndirectory="r"\n', "job")
NOTES: dict[str, Any] = {"scale": 2.0, "mask": None}
calls = 0


class Context:
    def __init__(self) -> None:
        self.mask: Any = None
        self.width = 4
        self.tables: dict[int, torch.Tensor] = {}


class Layer(nn.Module):
    """Has a context, a generator and a list; does nothing with them."""

    def __init__(self, context: Any, random: Any = None, parts: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = {"context": context}
        self.random, self.parts = random, parts

    @property
    def context(self) -> Any:
        return self.inner["context"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.context.width


class Masking(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.context.mask = (x > 0).float()
        return super().forward(x)


class Growing(Layer):
    """Puts something new into a dictionary that was empty."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.context.tables[0] = x.detach().mean(0)
        return super().forward(x)


class Drawing(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.random.random()


class Noting(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _note(x)
        return super().forward(x)


class Noted(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if NOTES["mask"] is None else NOTES["mask"])


class Counting(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global calls
        calls += 1
        return super().forward(x) * calls


class OfAClass(Layer):
    times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).times += 1
        return super().forward(x) * self.times


class Tabulating(Layer):
    """Makes a table in its context where there is none, as rotary embeddings do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] not in self.context.tables:
            self.context.tables[x.shape[-1]] = torch.arange(4.0)
        return super().forward(x) + self.context.tables[4] * NOTES["scale"]


def _note(x: torch.Tensor) -> None:
    NOTES["mask"] = (x > 0).float()


def chain_of(*kinds: type[nn.Module]) -> Chain:
    def again() -> Any:
        context, random, parts = Context(), Random(3), [1]
        made = [kind(context, random, parts) if issubclass(kind, Layer) else kind() for kind in kinds]
        return [(f"l{n}", layer) for n, layer in enumerate(made)]

    return Chain(again(), again)


def hooked(kind: str) -> Chain:
    """Layers 0 and 2 of which functions, not their forwards, have something in common."""

    def again() -> Any:
        layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
        found: dict[str, Any] = {"x": None}
        context = Context()
        count = 0
        kept: Any = None

        def note(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            nonlocal kept
            kept = output

        def use(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output if kept is None else output + kept.mean()

        def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            found["x"] = output

        def take(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output if found["x"] is None else output + found["x"].mean()

        def add(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return output * count

        def mask(context: Any, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            context.mask = output

        first, last = {
            "closure": (keep, take),
            "counter": (add, add),
            "variable": (note, use),
            "partial": (functools.partial(mask, context), functools.partial(mask, context)),
        }[kind]
        layers[0].register_forward_hook(first)
        layers[2].register_forward_hook(last)
        return [(f"l{n}", layer) for n, layer in enumerate(layers)]

    return Chain(again(), again)


@pytest.mark.parametrize("kind", ["closure", "counter", "variable", "partial"])
def test_what_hooks_change_must_not_be_parted(kind: str) -> None:
    with pytest.raises(UserError, match=r"layers 0 and 2 have _forward_hooks\.0\.\S+ in common, and a forward changes it"):
        probed(hooked(kind), 0, 1)
    together = probed(hooked(kind), 0, 3)
    assert not together.found.parted
    assert together.found.alone
    assert together.found.forgets


class Counter:
    """Judges, and weighs what it is asked first less."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(output, target) * self.calls

    def judge(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self(output, target)

    def scale(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * self.calls


def counting(output: torch.Tensor | None = None) -> Any:
    """A function that counts its calls in a variable of the function around it."""
    calls = [0]

    def scale(*given: Any) -> Any:
        calls[0] += 1
        if output is None and len(given) == 2:
            return nn.functional.cross_entropy(*given) * calls[0]
        return given[-1] * calls[0]

    return scale


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("hook", "_forward_hooks.0.calls"), ("method", "_forward_hooks.0.__self__"), ("attribute", "scale.calls")],
)
def test_what_a_function_of_one_layer_counts(kind: str, name: str) -> None:
    """One rank must compute the forwards that count, and checkpoints cannot keep the number."""

    def again() -> Any:
        layer = Calling() if kind == "attribute" else nn.Tanh()
        if kind != "attribute":
            layer.register_forward_hook(counting() if kind == "hook" else Counter().scale)
        return [("l0", nn.Linear(4, 4)), ("l1", layer)]

    stage = probed(Chain(again(), again), 0, 2)
    assert stage.found.alone == f"a forward changes l1.{name}"
    assert stage.found.forgets == [f"l1.{name}"]


@pytest.mark.parametrize(
    ("loss", "name"),
    [(Counter(), "attributes"), (Counter().judge, "__self__"), (counting(), "calls"), (nn.functional.cross_entropy, "")],
    ids=["object", "method", "closure", "none"],
)
def test_what_a_loss_that_is_no_module_counts(loss: Any, name: str) -> None:
    chain = chain_of(Layer, Layer)
    stage = Stage(build_stage(chain, 0, 2, 0, loss), JOB, Loss("own", loss), False)
    probe(stage, (torch.randn(3, 4),), torch.tensor([0, 1, 2]), lambda specs, of: ())
    assert stage.found.alone == (f"a forward changes the loss.{name}" if name else "")
    assert stage.found.forgets == ([f"the loss.{name}"] if name else [])


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return x * self.times


@pytest.mark.parametrize("within", [False, True])
def test_a_module_that_is_in_two_layers(within: bool) -> None:
    def again() -> Any:
        scaling = Scaling()
        made = [scaling, nn.Linear(4, 4), scaling]
        return [(f"l{n}", nn.Sequential(layer, nn.Tanh()) if within else layer) for n, layer in enumerate(made)]

    chain = Chain(again(), again)
    what = r"0\.attributes|0" if within else "attributes"
    with pytest.raises(UserError, match=rf"layers 0 and 2 have ({what}) in common, and a forward changes it"):
        probed(chain, 0, 2)
    stage = probed(chain, 0, 3)
    assert stage.layers[0] is stage.layers[2] or within
    assert not stage.found.parted


def judged(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output if NOTES["mask"] is None else output * NOTES["mask"].mean(), target)


def test_a_loss_may_read_what_a_layer_leaves() -> None:
    chain = chain_of(Noting, Layer)
    stage = Stage(build_stage(chain, 0, 1, 0, judged), JOB, None, False)
    with pytest.raises(UserError, match=r"layers 0 and 2 have \S+NOTES in common"):
        probe(stage, (torch.randn(3, 4),), None, lambda specs, of: (torch.ones(3, 4),))
    whole = Stage(build_stage(chain, 0, 2, 0, judged), JOB, Loss("own", judged), False)
    probe(whole, (torch.randn(3, 4),), torch.tensor([0, 1, 2]), lambda specs, of: ())


def probed(chain: Chain, start: int, stop: int) -> Stage:
    stage = Stage(build_stage(chain, start, stop, 0), JOB, None, False)
    probe(stage, (torch.randn(3, 4),), None, lambda specs, of: (torch.ones(3, 4),))
    return stage


@pytest.mark.parametrize(
    ("kinds", "what"),
    [
        ((Masking, nn.Tanh, Layer), "inner.context"),
        ((Growing, Layer), "inner.context"),
        ((Drawing, Drawing), "random"),
        ((Noting, Noted), "NOTES"),
        ((Counting, Layer, Counting), "calls"),
        ((OfAClass, OfAClass), "OfAClass.times"),
    ],
)
def test_what_forwards_change_must_not_be_parted(kinds: Any, what: str) -> None:
    chain = chain_of(*kinds)
    with pytest.raises(
        UserError, match=rf"layers 0 and {len(kinds) - 1} have \S*{what} in common, and a forward changes it"
    ):
        probed(chain, 0, 1)
    assert not probed(chain, 0, len(kinds)).found.parted
    shared, *_ = [one for one in outline(chain, 0, (torch.randn(3, 4),)).shared if "in common" in one.text]
    assert (shared.first, shared.last, shared.constant) == (0, len(kinds) - 1, False)


def test_what_is_only_read_may_be_parted() -> None:
    """Configurations, generators that nobody asks, tables that are made once."""
    chain = chain_of(Layer, Tabulating, Tabulating, Noted)
    texts = {place.text for one in chain.common() for _, place in one.places}
    assert {"inner.context", "random", "parts"} <= texts
    for start in range(4):
        stage = probed(chain, start, start + 1)
        assert (stage.found.alone, stage.found.forgets) == ("", [])
    assert not [one for one in outline(chain, 0, (torch.randn(3, 4),)).shared if not one.constant]


def test_variables_count_where_nothing_is_parted() -> None:
    """One rank must compute the forwards that change them, and checkpoints cannot keep them."""
    before = calls
    stage = probed(chain_of(Counting, Layer), 0, 2)
    assert calls == before
    assert stage.found.alone == f"a forward changes {__name__}.calls"
    assert stage.found.forgets == [f"{__name__}.calls"]


def test_a_place_that_is_gone_is_no_change() -> None:
    chain = chain_of(Layer, Layer)
    layer = chain.build(0, 0)
    seen = Seen([layer], 0, chain.common())
    del layer.inner, layer.random
    assert seen.changed() == []
