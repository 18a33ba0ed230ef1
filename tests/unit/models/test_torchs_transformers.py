"""Models around torch's own transformers are divided between their layers; evaluated, padding counts as in a plain loop."""

from collections.abc import Sequence

import pytest
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


class Translating(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)

    def forward(self, ids: torch.Tensor, begun: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(begun.shape[1])
        found = self.transformer(self.embedding(ids), self.embedding(begun), tgt_mask=mask)
        return self.head(found)


class Parallel(nn.Module):
    """With a part as scripts for several GPUs have it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def all_of_them(count: int) -> Sequence[Sequence[int]]:
    return [[], list(range(1, count))]


def mean_square(result: torch.Tensor) -> torch.Tensor:
    return result.square().mean()


def padded() -> list[torch.Tensor]:
    ids = torch.randint(1, 20, (3, 6))
    ids[0, 3:] = ids[1, 4:] = 0
    return [ids, ids[:2]]


@pytest.mark.parametrize("kind", [nn.TransformerEncoder, Stack])
def test_what_is_padded_is_evaluated_as_in_a_plain_loop(kind: type[nn.TransformerEncoder]) -> None:
    assert check(lambda: Padded(kind), padded(), mean_square, all_of_them).undivided == ["encoder"]


def test_an_encoder_is_divided_between_its_layers() -> None:
    chain = check(lambda: Padded(nn.TransformerEncoder, nested=False), padded(), mean_square, all_of_them)
    assert {"encoder-layers-0", "encoder-layers-1"} <= set(chain.names)


def test_so_are_both_halves_of_a_transformer() -> None:
    ids = torch.randint(0, 20, (3, 6))
    chain = check(Translating, [(ids, ids[:, :5]), (ids[:2], ids[:2])], mean_square, all_of_them)
    assert {f"transformer-{half}-layers-{n}" for half in ("encoder", "decoder") for n in (0, 1)} <= set(chain.names)


def test_and_what_data_parallel_calls() -> None:
    assert len(check(Parallel, [torch.randn(4, 6), torch.randn(3, 6)], mean_square, all_of_them)) == 3
