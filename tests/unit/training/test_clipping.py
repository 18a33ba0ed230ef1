"""Clipping by the norm over the whole model."""

import copy
from collections.abc import Sequence
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import nn

from accept_mpi.comm.messages import GradientNorms
from accept_mpi.errors import UserError
from accept_mpi.pipeline.kept_norms import KeptNorms
from accept_mpi.training.clipping import Clipping


@pytest.mark.parametrize(
    "kinds",
    [
        [torch.float32], [torch.float64], [torch.complex64], [torch.complex128], [torch.bfloat16],
        [torch.float32, torch.bfloat16], [torch.float32, torch.complex64],
        [torch.bfloat16, torch.float32, torch.float64, torch.float32], [torch.float16, torch.complex64, torch.bfloat16],
    ],
)  # fmt: skip
def test_two_stages_get_the_factor_of_one_process(kinds: list[torch.dtype]) -> None:
    """Bit for bit, in whatever precision the model is, or its parts are."""
    torch.manual_seed(1)
    for _ in range(20):
        whole = [nn.Parameter(torch.zeros(50 + n, dtype=kinds[n % len(kinds)])) for n in range(5)]
        for parameter in whole:
            parameter.grad = torch.randn(len(parameter), dtype=parameter.dtype)
        given = [parameter.grad.clone() for parameter in whole if parameter.grad is not None]
        torch.nn.utils.clip_grad_norm_(whole, 0.3)
        posted = Mock()
        first, second = (
            Clipping(0.3, posted, stage, 2, [1 - stage], 0, range(1), True, KeptNorms(), ()) for stage in range(2)
        )
        parts = (first, given[:2], [0, 1]), (second, given[2:], [2, 3, 4])
        for one, gradients, positions in parts:
            one.tell(0, gradients, positions)
        for _, control in (call.args for call in posted.post.call_args_list):
            heard = msgspec.msgpack.decode(msgspec.msgpack.encode(control), type=GradientNorms)
            (second if control.stage == 0 else first).handle(heard)
        for one, gradients, positions in parts:
            factor = one.factor(0, gradients, positions, 60.0)
            for at, gradient in zip(positions, gradients, strict=True):
                assert torch.equal(gradient.mul_(factor), whole[at].grad)


def test_norms_that_nobody_waits_for_are_not_told() -> None:
    """Asynchronously those of a deployment's last steps: they came in the next one, which took them for its own."""
    posted = Mock()
    clipping = Clipping(0.3, posted, 0, 2, [1], 3, range(10, 18), False, KeptNorms(), ())
    for step in range(10, 18):
        clipping.tell(step, [torch.ones(2)], [0])
    assert [call.args[1].step for call in posted.post.call_args_list] == [10, 11, 12, 13, 14]


def clipped(steps: range, states: Sequence[dict[str, torch.Tensor]], halt: int) -> tuple[list[list[float]], list[KeptNorms]]:
    """Factors of two stages that tell each other their norms, which the steps two later take; and the norms that the stages
    have kept after step ``halt``. They begin with ``states``."""
    kept = [KeptNorms([name], 2) for name in "ab"]
    for one, state in zip(kept, states, strict=False):
        one.put(state)
    posted, known = Mock(), set(range(steps.start - 2, steps.start)) if states else set()
    pair = [Clipping(1.0, posted, n, 2, [1 - n], 2, steps, False, kept[n], known) for n in range(2)]
    factors, then = [], []
    for step in steps:
        for n, one in enumerate(pair):
            one.tell(step, [torch.tensor([3.0 + n + step])], [n])
        for dest, control in (call.args for call in posted.post.call_args_list):
            pair[dest].handle(control)
        posted.reset_mock()
        factors.append([float(one.factor(step, [], [], 60.0)) for one in pair])
        if step == halt:
            then = copy.deepcopy(kept)
    return factors, then


def test_a_resumed_stage_clips_with_the_norms_that_others_had_before() -> None:
    """It took its own alone, so that a resumed run was another than one that went on."""
    straight, kept = clipped(range(6), (), 2)
    assert kept[0].of == {1: [(0, 4.0, "float32")], 2: [(0, 5.0, "float32")]}
    resumed, _ = clipped(range(3, 6), [one.state() for one in kept], 5)
    assert resumed == straight[3:]
    assert clipped(range(3, 6), (), 5)[0] != straight[3:]


def test_norms_of_other_layers_are_passed_over_and_damaged_ones_refused() -> None:
    one = KeptNorms(["a", "b"], 2)
    one.keep(3, [(0, 1.0, "float32")])
    for names, most in ((["b"], 2), (["a"], 2), (["a", "b"], 0)):
        other = KeptNorms(names, most)
        other.put(one.state())
        assert other.of == {}
    with pytest.raises(UserError, match=r"norms/b\.@3.* is damaged"):
        KeptNorms(["a", "b"], 2).put({"norms/b.@3": torch.zeros(5, dtype=torch.uint8)})
