"""Modules that torch.jit has compiled."""

import torch
from torch import nn

from accept_mpi.errors import UserError


def refuse_scripted(what: str, model: nn.Module) -> None:
    """Raise UserError if torch.jit has compiled a module or a part of it: its code is not Python any more, its copies cannot
    be trained, and it cannot be given other weights. ``what``: the model, or one of its layers, in messages."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"model.name: {path}, a part of {what}," if path else f"model.name: {what}"
            raise UserError(
                f"{which} has been compiled by torch.jit.script or torch.jit.trace, and can be neither divided nor "
                "copied: give the module itself (functions that forward calls may be compiled)"
            )
