"""``accept_mpi export``: a checkpoint as one file that the plain whole model loads."""

import contextlib
import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from accept_mpi.errors import UserError
from accept_mpi.memory import available_memory
from accept_mpi.snapshot import Checkpoint

_TORCH = (".pt", ".pth")


def export(source: Path, out: Path) -> int:
    """Write the whole model's state_dict to ``out``: .safetensors, or with ``torch.save`` .pt or .pth. What is there already
    stays until all of the new is on the disk.

    Raises UserError where ``out`` ends otherwise or cannot be written, or the checkpoint is missing or damaged.
    """
    if out.suffix not in (".safetensors", *_TORCH):
        raise UserError(f"{out}: expected a file name that ends in .safetensors, {' or '.join(_TORCH)}")
    checkpoint = Checkpoint(source, available_memory(), ("weights",))
    try:
        target = Path(os.path.realpath(out))  # what a link leads to
        if target.parent == checkpoint.path.resolve():
            raise UserError(f"{out}: cannot write: it is in the checkpoint itself; choose another folder")
        if target.exists() and not target.is_file():
            raise UserError(f"{out}: cannot write: it is there already, and is no file")
        state = checkpoint.whole()
        if not state:
            raise UserError(f"{checkpoint.path}: damaged checkpoint: it holds no weights of any layer")
        _write(target, state, {"step": str(checkpoint.manifest.step), "model": checkpoint.manifest.model})
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{out}: cannot write: {getattr(error, 'strerror', None) or error}") from error
    bad = sum(1 for value in state.values() if value.is_floating_point() and not torch.isfinite(value.float()).all())
    note = f", {bad} of which hold values that are not finite" if bad else ""
    print(f"{out}: {len(state)} tensors of step {checkpoint.manifest.step}{note}")
    return 0


def _write(target: Path, state: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """Whole or not at all, beside whatever else is there."""
    handle, name = tempfile.mkstemp(prefix=f".{target.stem[:40]}-", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    beside = Path(name)
    try:
        if target.suffix in _TORCH:
            torch.save(state, beside)
        else:
            save_file(state, beside, metadata=about)
        mask = os.umask(0)
        os.umask(mask)
        beside.chmod(0o666 & ~mask)  # until here for this user alone
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        beside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
