"""Clipping by the norm over the whole model."""

from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import nn

from accept_mpi.comm.messages import GradientNorms
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
        first, second = (Clipping(0.3, posted, stage, 2, [1 - stage], 0, range(1), True) for stage in range(2))
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
    clipping = Clipping(0.3, posted, 0, 2, [1], 3, range(10, 18), False)
    for step in range(10, 18):
        clipping.tell(step, [torch.ones(2)], [0])
    assert [call.args[1].step for call in posted.post.call_args_list] == [10, 11, 12, 13, 14]
