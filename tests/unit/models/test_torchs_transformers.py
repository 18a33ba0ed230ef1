"""Models around torch's own transformers are evaluated as in a plain loop, also where inputs are padded."""

from collections.abc import Sequence

import torch
from recorded_models import check
from torch import nn


class Stack(nn.TransformerEncoder):
    """Torch's, under another name."""


class Padded(nn.Module):
    """Its result depends on what the encoder gives where the input is padded: in evaluation that is 0."""

    def __init__(self, kind: type[nn.TransformerEncoder], nested: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.head = kind(layer, 2, enable_nested_tensor=nested), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0).mean(1))


def all_of_them(count: int) -> Sequence[Sequence[int]]:
    return [[], list(range(1, count))]


def mean_square(result: torch.Tensor) -> torch.Tensor:
    return result.square().mean()


def padded() -> list[torch.Tensor]:
    ids = torch.randint(1, 20, (3, 6))
    ids[0, 3:] = ids[1, 4:] = 0
    return [ids, ids[:2]]


def test_what_is_padded_is_evaluated_as_in_a_plain_loop() -> None:
    assert check(lambda: Padded(Stack), padded(), mean_square, all_of_them).undivided == ["encoder"]
