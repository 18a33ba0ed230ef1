"""Gradients as chunks and back."""

import pytest
import torch
from torch import nn

from accept_mpi.codecs.gradient_chunks import Layout


def parameters() -> list[torch.Tensor]:
    """Small and large ones, of two dtypes, contiguous and in channels_last, empty ones, too."""
    large = nn.Conv2d(128, 160, 3).to(memory_format=torch.channels_last).weight  # type: ignore[call-overload]
    made = [torch.zeros(7), torch.zeros(300, 300), torch.zeros(3, 5).double(), torch.zeros(0), torch.zeros(())]
    made.append(torch.zeros(40, 300).t())
    return [made[0], large.detach(), *made[1:]]


@pytest.mark.parametrize("members", [2, 3, 5])
def test_chunks_and_back(members: int) -> None:
    torch.manual_seed(0)
    mine = parameters()
    layout = Layout(mine, members)
    gradients: list[torch.Tensor | None] = [torch.randn_like(p) for p in mine]
    gradients[2] = None
    gradients[1] = gradients[1].contiguous()  # laid out otherwise than its parameter
    chunks = list(layout.pack(gradients).values())
    assert [(chunk.shape, chunk.dtype) for chunk in chunks] == [
        (torch.Size(layout.spec(c).shape), layout.spec(c).torch_dtype) for c in range(len(chunks))
    ]
    for given, found, parameter in zip(gradients, layout.unpack(chunks), mine, strict=True):
        if given is None:
            assert found is None
        else:
            assert found is not None
            assert torch.equal(found, given)
            assert found.stride() == torch.empty_like(parameter).stride()
    owners = layout.owners(members)
    loads = [sum(chunk.numel() for chunk, owner in zip(chunks, owners, strict=True) if owner == m) for m in range(members)]
    assert max(loads) <= 1.7 * sum(loads) / members


def test_some_chunks_of_some_gradients() -> None:
    """Those of later layers go first: any chunks, also with others between them, are what they are among all."""
    torch.manual_seed(0)
    mine = [torch.zeros(600_000), torch.zeros(7).double(), torch.zeros(400_000), torch.zeros(300_000).double()]
    layout = Layout(mine, 2, [0, 3, 3, 5])
    gradients: list[torch.Tensor | None] = [torch.randn_like(p) for p in mine]
    gradients[1] = gradients[3] = None
    every = layout.pack(gradients)
    count = len(layout.chunks)
    assert count > 5
    assert {chunk.dtype for chunk in every.values()} == {torch.uint8, torch.float32, torch.float64}
    for some in ([1, 3], [2, 3], [0, 2, count - 1], [1, 2, 4], list(range(1, count))):
        for _ in range(2):
            found = layout.pack_some(gradients, some)
            assert list(found) == some
            assert all(torch.equal(found[c], every[c]) and found[c].dtype == every[c].dtype for c in some)
    assert layout.layers == {0, 3, 5}
    assert layout.whole(0, [2]) == [c for c in range(1, count) if c != 2]
    later = layout.whole(3, [])
    assert all(layout.within([c])[0] > 0 for c in later)
    assert 0 in layout.within(set(range(1, count)).difference(later))
    assert layout.whole(-1, []) == list(range(count))
