"""Data sets of random samples of the right shapes. Speed and agreement are measured here, not learning."""

import torch
from torch.utils.data import TensorDataset

_SAMPLES = 2048


def images(size: int) -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(_SAMPLES, 3, size, size, generator=generator)
    y = torch.randint(10, (_SAMPLES,), generator=generator)
    return TensorDataset(x, y), TensorDataset(x[:64], y[:64])


def tokens(context: int) -> tuple[TensorDataset, TensorDataset]:
    rows = torch.randint(96, (_SAMPLES, context + 1), generator=torch.Generator().manual_seed(7))
    made = TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    return made, TensorDataset(*(part[:64] for part in made.tensors))
