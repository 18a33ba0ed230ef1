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
