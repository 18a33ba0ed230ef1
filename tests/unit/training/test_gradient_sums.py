"""A step's gradients, put together from what actions leave."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accept_mpi.training.gradient_sums import GradientSums, Part

B_OF_0, W_OF_0, B_OF_1 = "B of 0", "W of 0", "B of 1"  # B of 1 leaves nothing to W


@pytest.mark.parametrize("order", list(itertools.permutations([B_OF_0, W_OF_0, B_OF_1])))
def test_parts_of_a_micro_batch_may_come_in_any_order(order: tuple[str, ...]) -> None:
    """Lanes may end W before what follows from its B, which waits for earlier Bs. Such Bs' gradients were left out."""
    stage: Any = SimpleNamespace(statistics=None, trained=[0, 1])
    sums = GradientSums(stage, [Part([0, 1], None)], lambda step: [0, 1])

    def of(value: float) -> torch.Tensor:
        return torch.full((2,), value)

    for action in order:
        if action == B_OF_0:
            sums.after_backward(5, 0, [of(1), None], 1.0, whole=False)
        elif action == W_OF_0:
            sums.after_weight_gradient(5, 0, [of(2), of(4)], 1.0)
        else:
            sums.after_backward(5, 1, [of(8), of(16)], 1.0, whole=True)
    sums.wait(5, 1.0)
    gradients, scale = sums._summed
    assert scale == 1.0
    assert [gradient.tolist() for gradient in gradients if gradient is not None] == [[11.0, 11.0], [20.0, 20.0]]


def test_a_part_that_never_comes_is_an_error() -> None:
    sums = GradientSums(SimpleNamespace(statistics=None), [Part([0], None)], lambda step: [0])  # type: ignore[arg-type]
    sums.after_backward(0, 0, [torch.ones(1)], 1.0, whole=False)
    with pytest.raises(AssertionError, match="gradients of step 1 are missing"):
        sums.wait(0, 1.0)


class Given:
    """A group's sums, as they come out."""

    exact = True

    def __init__(self, gradients: list[torch.Tensor], scale: float) -> None:
        self._found = gradients, scale

    def take(self, step: int, deadline: float) -> tuple[list[torch.Tensor], float]:
        return self._found


@pytest.mark.parametrize(("own", "tied"), [([0, 1], []), ([], [0, 1]), ([0], [1]), ([1], [0])])
def test_gradients_and_scale_are_those_of_own_and_tied_parameters(own: list[int], tied: list[int]) -> None:
    """A part without parameters knows no scale."""
    values = torch.tensor([5.0]), torch.tensor([7.0])
    parts: list[Any] = [Part(p, Given([values[n] for n in p], 0.25 if p else 1.0)) for p in (own, tied)]  # type: ignore[arg-type]
    sums = GradientSums(SimpleNamespace(statistics=None), parts, lambda step: [0])  # type: ignore[arg-type]
    sums.wait(3, 1.0)
    assert sums._summed == ([*values], 0.25)


def test_whole_gradients_are_scaled_once() -> None:
    """Where norms are told before the update (clipping in the delayed schedule)."""
    sums = GradientSums(SimpleNamespace(statistics=None), [Part([0, 1], None)], lambda step: [0, 1])  # type: ignore[arg-type]
    sums.after_backward(4, 1, [torch.ones(2), None], 0.5, whole=True)
    assert sums.whole(4) is None
    sums.after_backward(4, 0, [torch.full((2,), 3.0), None], 8.0, whole=True)  # the scale that the last micro-batch knows
    for _ in range(2):
        gradient, none = sums.whole(4) or ()
        assert (gradient.tolist(), none) == ([2.0, 2.0], None)
    sums.wait(4, 1.0)
    (gradient, none), scale = sums._summed
    assert gradient is not None
    assert ((scale * gradient).tolist(), none) == ([2.0, 2.0], None)
