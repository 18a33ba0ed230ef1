"""``accept_mpi export``: converts a checkpoint to one file that the plain, undivided model can load."""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError

from accept_mpi.device.memory import available_memory
from accept_mpi.errors import UserError, counted
from accept_mpi.files.regular import replacing
from accept_mpi.models import undivided
from accept_mpi.models.fine_tuning import merged
from accept_mpi.pipeline.state import is_packed, unpacked
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.recovery.tensor_file import written

_TORCH = (".pt", ".pth")
_PIECE = 1 << 20  # bytes


def export(source: Path, out: Path, average: bool = False, merge: bool = False) -> int:
    """Write the whole model's state_dict to ``out``: as .safetensors, or with ``torch.save`` as .pt or .pth. ``average``:
    with the moving averages of its weights; ``merge``: with what adapters add in the weights, and without adapters.

    An existing file stays until the new one is complete. Raises UserError if ``out`` has another suffix or cannot be
    written, or if the checkpoint is missing or damaged.
    """
    if out.suffix not in (".safetensors", *_TORCH):
        raise UserError(f"{out}: expected a file name that ends in .safetensors, {' or '.join(_TORCH)}")
    checkpoint = Checkpoint(source, available_memory(), ("weights", "optimizer") if average else ("weights",))
    try:
        target = Path(os.path.realpath(out))  # write to the target of a link instead of replacing the link
        if target.parent == checkpoint.path.resolve():
            raise UserError(f"{out}: cannot write: it is in the checkpoint itself; choose another folder")
        state = checkpoint.whole(average)
        if not state:
            raise UserError(f"{checkpoint.path}: damaged checkpoint: it holds no weights of any layer")
        if merge:
            job = checkpoint.job
            if job.train.lora is None:
                raise UserError(f"{checkpoint.path}: it holds no adapters; train.lora makes them")
            state = merged(state, undivided(job.without_weights()))
        with replacing(target) as beside:
            _write(beside, state, {"step": str(checkpoint.manifest.step), "model": checkpoint.manifest.model})
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise UserError(f"{out}: cannot write: {getattr(error, 'strerror', None) or error}") from error
    bad = sum(1 for value in state.values() if value.is_floating_point() and not torch.isfinite(value.float()).all())
    note = f", {bad} of which hold values that are not finite" if bad else ""
    if memory := [key.partition("/")[2] for key in checkpoint.remembered()]:
        print(f"left out, since load_state_dict() takes no attributes: {', '.join(sorted(memory))}")
    print(f"{out}: {counted(len(state), 'tensor')} of step {checkpoint.manifest.step}{note}")
    return 0


def _write(path: Path, state: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """Write ``state``: the same bytes for the same weights. Only torch's files can hold state that is not a tensor; for
    .safetensors its names are printed."""
    odd = {name: unpacked(value) for name, value in state.items() if is_packed(value)}
    if path.suffix in _TORCH:
        with path.open("wb") as file:  # given a name, torch.save writes that into the file
            try:
                torch.save(state | odd, file)
            except RuntimeError as error:  # torch's own words on what the file has refused
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    else:
        if odd:
            print(f"left out, since they are no tensors: {', '.join(odd)}; a file that ends in .pt has them")
        _, pieces = written({name: value.contiguous() for name, value in state.items() if name not in odd}, _PIECE, about)
        with path.open("wb") as file:
            file.writelines(pieces)
