"""Modules that share a buffer share it on a GPU, too; the meta device stands for one."""

import torch
from torch import nn

from accept_mpi.device.compute import Gpu


class Counting(nn.Module):
    def __init__(self, count: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("count", count)
        self.register_buffer("none", None)
        self.linear = nn.Linear(2, 2)


def test_they_share_it() -> None:
    device = Gpu("meta")
    shared = torch.zeros(3)
    first, second, other = Counting(shared), nn.Sequential(Counting(shared)), Counting(torch.zeros(3))
    for module in (first, second, other):
        device.hold(module)
    assert {tensor.device.type for tensor in (*first.parameters(), *first.buffers(), *second.buffers())} == {"meta"}
    assert first.count is second[0].count
    assert first.count is not other.count
    before = first.count
    device.hold(first)
    assert first.count is before
    del first, second, before
    assert len(device._moved) == 2
    device.hold(Counting(torch.ones(3)))
    again = Counting(shared)
    device.hold(again)  # of another stage, after the first is gone
    assert again.count.device.type == "meta"
