"""``accept_mpi export``: a checkpoint as one file that the plain whole model loads."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from accept_mpi.errors import UserError
from accept_mpi.plain_files import replacing
from accept_mpi.snapshot import Checkpoint

_TORCH = (".pt", ".pth")


def export(source: Path, out: Path) -> int:
    """Write the whole model's state_dict to ``out``: .safetensors, or with ``torch.save`` .pt or .pth.

    Raises UserError where ``out`` ends otherwise or cannot be written, or the checkpoint is missing or damaged.
    """
    if out.suffix not in (".safetensors", *_TORCH):
        raise UserError(f"{out}: expected a file name that ends in .safetensors, {' or '.join(_TORCH)}")
    checkpoint = Checkpoint(source)
    state = checkpoint.whole()
    try:
        with replacing(out) as beside:
            if out.suffix in _TORCH:
                torch.save(state, beside)
            else:
                about = {"step": str(checkpoint.manifest.step), "model": checkpoint.manifest.model}
                save_file(state, beside, metadata=about)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{out}: cannot write: {getattr(error, 'strerror', None) or error}") from error
    print(f"{out}: {len(state)} tensors of step {checkpoint.manifest.step}")
    return 0
