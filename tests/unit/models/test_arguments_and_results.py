"""What a model's forward gets of a sample, and what of its result is the loss."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from recorded_models import recorded
from torch import nn
from torch.nn import functional as F

from accept_mpi import tree
from accept_mpi.errors import UserError
from accept_mpi.models.base import Chain
from accept_mpi.models.losses import find_loss, scores


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


class TakesABatch(Net):
    def forward(self, batch: Any) -> torch.Tensor:
        return self.scores(batch["x"] if isinstance(batch, dict) else batch[0] + batch[1])


class TakesNames(Net):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.scores(x if scale is None else x * scale)


class Outputs(NamedTuple):
    aux: torch.Tensor
    logits: torch.Tensor
    nothing: None = None


class GivesANamedTuple(Net):
    """In training only, as torchvision's GoogLeNet does."""

    def forward(self, x: torch.Tensor) -> Any:
        return Outputs(self.one(x), self.scores(x)) if self.training else self.scores(x)


class GivesAnOrderedDict(Net):
    """As torchvision's models of segmentation do."""

    def forward(self, x: torch.Tensor) -> Any:
        return OrderedDict(out=self.scores(x), aux=self.one(x))


class GivesScoresAndLoss(Net):
    """As nanoGPT does."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        scores = self.scores(x)
        return scores, None if targets is None else F.cross_entropy(scores, targets)


def computed(chain: Chain, value: Any) -> Any:
    for layer in chain.build_range(0, len(chain), 0):
        value = layer(value)
    return value


def fresh(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return kind()


@pytest.mark.parametrize("value", [{"x": torch.randn(4, 6), "name": torch.ones(4)}, (torch.randn(4, 6), torch.ones(4, 6))])
def test_a_forward_that_takes_a_whole_batch(value: Any) -> None:
    assert torch.equal(computed(recorded(TakesABatch, value), value), fresh(TakesABatch)(value))


class Sample(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor


class TakesTwo(Net):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.scores(x * scale)


class TakesASample(Net):
    def forward(self, sample: Sample) -> torch.Tensor:
        return self.scores(sample.x * sample.scale)


def test_samples_of_classes_of_their_own() -> None:
    """Named tuples and ordered dicts were given whole to a forward that takes their parts."""
    value = Sample(torch.randn(4, 6), torch.randn(4, 6))
    wanted = fresh(TakesTwo)(*value)
    ordered = OrderedDict(scale=value.scale, x=value.x)
    for kind, given in ((TakesTwo, value), (TakesASample, value), (TakesTwo, ordered)):
        assert torch.equal(computed(recorded(kind, given), given), wanted)


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"image": torch.randn(4, 6)}, r"\(missing a required argument: 'x'\).* a dict becomes its keyword arguments"),
        ((torch.randn(4, 6), torch.ones(6), torch.ones(6)), r"\(too many positional arguments\).* a tuple its arguments"),
    ],
)
def test_a_forward_that_takes_something_else(value: Any, wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        recorded(TakesNames, value)


def test_a_forward_that_takes_more() -> None:
    with pytest.raises(UserError, match=r"\(missing a required argument: 'scale'\).* and this is \(4, 6\) float32"):
        recorded(TakesTwo, torch.randn(4, 6))


def test_a_loss_gets_named_and_ordered_results() -> None:
    x = torch.randn(4, 6)
    for kind, scored in ((GivesANamedTuple, "logits"), (GivesAnOrderedDict, "out")):
        given, plain = computed(recorded(kind, x), x), fresh(kind)(x)
        assert type(given) is type(plain)
        assert all(map(torch.equal, tree.leaves(given), tree.leaves(plain)))
        wanted = plain._asdict() if isinstance(plain, Outputs) else plain
        assert torch.equal(scores(given), wanted[scored])


def test_a_loss_that_is_a_class() -> None:
    one, other = torch.randn(4, 6), torch.randn(4, 6)
    found = find_loss("torch.nn:L1Loss")
    assert torch.equal(found(one, other, 4).value, F.l1_loss(one, other))
    assert found(one, other, 4).count == 24
    with pytest.raises(UserError, match="AdaptiveLogSoftmaxWithLoss"):
        find_loss("torch.nn:AdaptiveLogSoftmaxWithLoss")


def test_a_loss_on_trial_says_what_it_cannot_take() -> None:
    loss = find_loss("torch.nn:BCEWithLogitsLoss").apart()
    with pytest.raises(UserError, match="cannot take outputs"):
        loss(torch.randn(4, 1), torch.ones(4), 4)


def test_the_loss_among_other_parts() -> None:
    value = {"x": torch.randn(4, 6), "targets": torch.randint(0, 3, (4,))}
    assert torch.equal(computed(recorded(GivesScoresAndLoss, value, "loss"), value), fresh(GivesScoresAndLoss)(**value)[1])
    with pytest.raises(UserError, match=r'no tensors under "loss", but 2 values; .* where samples are dicts'):
        recorded(GivesScoresAndLoss, torch.randn(4, 6), "loss")


class SparseInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.eye(6).nonzero().t().contiguous())
        self.weight = nn.Parameter(torch.eye(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graph = torch.sparse_coo_tensor(self.places, torch.ones(6), (6, 6), check_invariants=False)  # type: ignore[arg-type]
        return torch.sparse.mm(graph, (x @ self.weight).t()).t()


class Graph(Net):
    """Whose adjacency is within a module, or the model's own."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.graph = SparseInside()
        self.adjacency = torch.eye(6).to_sparse() if own else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.graph(x) if self.adjacency is None else torch.sparse.mm(self.adjacency, x.t()).t())


def test_sparse_tensors() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(computed(recorded(Graph, x), x), fresh(Graph)(x))
    with pytest.raises(UserError, match=r"adjacency is a sparse tensor.* use it dense"):
        recorded(lambda: Graph(True), x)
