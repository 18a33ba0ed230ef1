"""Losses by name: the mean over a micro-batch's samples of what the last layer gives and the targets."""

from collections.abc import Callable

import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.imports import find_function

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def find_loss(name: str) -> Loss:
    """The loss that a job names. Raises UserError with one sentence, and so does the loss for what it cannot take."""
    loss = _LOSSES.get(name) or find_function(name, _LOSSES, "train.loss")
    wants = "; it wants scores (..., n) and int64 classes (...) from 0 to n - 1" if loss is cross_entropy else ""

    def checked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        try:
            if name == "mse" and output.shape != target.shape:
                raise ValueError("the shapes differ")  # torch would broadcast
            found = loss(output, target)
            if found.numel() != 1:
                raise ValueError(f"it gives {found.numel()} values instead of the mean over samples")
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            given = " and targets ".join(f"{tuple(v.shape)} {str(v.dtype)[6:]}" for v in (output, target))
            reason = " ".join(f"{wants}: {type(error).__name__}: {error}".split())
            raise UserError(f'train.loss: "{name}" cannot take outputs {given}{reason}') from error
        return found

    return checked


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of scores (..., classes) against classes (...)."""
    return nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


_LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": nn.functional.mse_loss}
