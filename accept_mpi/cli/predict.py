"""``accept_mpi predict``: what a trained model says of images, or of the rows of the test set, in one process."""

import csv
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from accept_mpi import tree
from accept_mpi.data import fetch
from accept_mpi.data import of_job as data_of
from accept_mpi.data.images import ImageFolder, class_names, pictures_in
from accept_mpi.device.memory import available_memory
from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.models import Chain, chain_of
from accept_mpi.models.losses import scores
from accept_mpi.profiling.layer_timer import micro_batch
from accept_mpi.recovery.checkpoint import Checkpoint, best_of

_AT_ONCE = 32


def predict(source: Path, folder: Path | None, best: bool, average: bool, top: int) -> int:
    """Print, as CSV, the ``top`` classes of each image in ``folder`` (without one: of each sample of the test set) with
    their probabilities, as a run's model sees them. ``source``: a run's directory or a checkpoint; ``best``: its best
    checkpoint; ``average``: with the moving averages of its weights. Raises UserError."""
    checkpoint = Checkpoint(best_of(source) if best else source, available_memory())
    job = Job.from_json(checkpoint.manifest.job)
    job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, weights=""))  # the checkpoint has them
    train, test = data_of(msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, mix=None)))
    chain = chain_of(job, lambda: micro_batch(train, job).value)
    model = _loaded(chain, job, checkpoint, average)
    names: list[str] = []
    if folder is not None:
        if not isinstance(train, ImageFolder):
            raise UserError(f'{folder}: the run was trained on "{job.data.name}", not on "images"')
        names = class_names(job.data.args)
        files = pictures_in(folder)
        data: Any = train.of([(file, 0) for file in files])
        rows = [str(file) for file in files]
    else:
        data, rows = test, [str(n) for n in range(len(test))]
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["sample", *(text for n in range(1, top + 1) for text in (f"class {n}", f"probability {n}"))])
    for begin in range(0, len(rows), _AT_ONCE):
        indices = np.arange(begin, min(len(rows), begin + _AT_ONCE))
        given = scores(model(fetch(data, indices, None, inputs=True, targets=False).inputs))
        if not isinstance(given, torch.Tensor) or given.dim() != 2:
            raise UserError(f"the model gives {tree.describe(given)} instead of scores (samples, classes)")
        values, classes = given.softmax(-1).topk(min(top, given.shape[-1]), dim=-1)
        for name, some, which in zip(rows[begin:], values.tolist(), classes.tolist(), strict=False):
            cells = [(names[k] if k < len(names) else k, f"{value:.4f}") for value, k in zip(some, which, strict=True)]
            out.writerow([name, *(cell for pair in cells for cell in pair)])
    return 0


def _loaded(chain: Chain, job: Job, checkpoint: Checkpoint, average: bool) -> Any:
    """A function that computes the whole model, in evaluation mode."""
    state = checkpoint.whole()
    if average:
        state |= checkpoint.averages()
    layers = chain.build_range(0, len(chain), job.train.seed)
    for index, layer in enumerate(layers):
        own = {key: state[chain.name_of(index, key)] for key in layer.state_dict() if chain.name_of(index, key) in state}
        try:
            layer.load_state_dict(own)
        except RuntimeError as error:
            raise UserError(f"{checkpoint.path}: does not fit the job's model: {' '.join(str(error).split())}") from error
        layer.eval()

    @torch.no_grad()
    def forward(value: Any) -> Any:
        for layer in layers:
            value = layer(value)
        return value

    return forward
