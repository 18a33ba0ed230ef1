"""``accept_mpi predict``: what a trained model says of images, or of the rows of the test set, in one process."""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
import torch

from accept_mpi import tree
from accept_mpi.data import fetch
from accept_mpi.data import of_job as data_of
from accept_mpi.data.images import ImageFolder, pictures_in
from accept_mpi.device.memory import available_memory
from accept_mpi.errors import UserError
from accept_mpi.models import Chain, chain_of
from accept_mpi.models.losses import loss_of, scores
from accept_mpi.pipeline.remembered import Remembered
from accept_mpi.pipeline.state import load_layer
from accept_mpi.profiling.layer_timer import micro_batch
from accept_mpi.recovery.checkpoint import Checkpoint

_AT_ONCE = 32


def predict(source: Path, folder: Path | None, average: bool, top: int, to: TextIO) -> int:
    """Write to ``to``, as CSV, the ``top`` classes of each image in ``folder`` (without one: of each sample of the test set)
    with their probabilities, as a run's model sees them. ``source``: a run's directory or a checkpoint; ``average``: with
    the moving averages of its weights. Raises UserError."""
    checkpoint = Checkpoint(source, available_memory())
    job = checkpoint.job.without_weights()
    train, test = data_of(msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, mix=None)))
    chain = chain_of(job, lambda: micro_batch(train, job).value)
    state, memory = checkpoint.by_layer(average), checkpoint.remembered()
    model = _loaded(chain, job.train.seed, state, memory, lambda: micro_batch(train, job).value)
    names, amounts = list[str](), loss_of(job).of_amounts
    if folder is not None:
        if not isinstance(train, ImageFolder):
            raise UserError(f'{folder}: the run was trained on "{job.data.name}", not on "images"')
        names = checkpoint.manifest.classes  # folders of classes may have come or gone since
        files = pictures_in(folder)
        data: Any = train.of([(file, 0) for file in files])
        rows = [str(file) for file in files]
    else:
        data, rows = test, [str(n) for n in range(len(test))]
    out = csv.writer(to, lineterminator="\n")
    for begin in range(0, len(rows), _AT_ONCE):
        indices = np.arange(begin, min(len(rows), begin + _AT_ONCE))
        inputs = fetch(data, indices, None, inputs=True, targets=False).inputs
        with torch.autocast("cpu", torch.bfloat16, enabled=job.train.precision == "bf16"):  # as evaluations do
            given = scores(model(inputs))
        if not isinstance(given, torch.Tensor) or given.dim() != 2 or given.shape[1] < 2 or amounts:
            what = f'with train.loss = "{job.train.loss}" the model gives {tree.describe(given)}'
            raise UserError(f"{what}, and predict shows scores of classes (samples, classes); export gives the weights")
        shown = min(top, given.shape[-1])
        if not begin:
            out.writerow(["sample", *(text for n in range(1, shown + 1) for text in (f"class {n}", f"probability {n}"))])
        values, classes = given.float().softmax(-1).topk(shown, dim=-1)
        for name, some, which in zip(rows[begin:], values.tolist(), classes.tolist(), strict=False):
            cells = [(names[k] if k < len(names) else k, f"{value:.4f}") for value, k in zip(some, which, strict=True)]
            out.writerow([name, *(cell for pair in cells for cell in pair)])
    return 0


def _loaded(
    chain: Chain,
    seed: int,
    state: Mapping[str, Mapping[str, torch.Tensor]],
    memory: Mapping[str, torch.Tensor],
    value: Callable[[], Any],
) -> Callable[[Any], Any]:
    """A function that computes the whole model, in evaluation mode. ``state``: that of each layer, by name; ``memory``: what
    training's forwards have left beside it; ``value``: gives inputs, for layers that are complete only after a forward.
    Raises UserError if the state is another model's."""
    layers = [layer.eval() for layer in chain.build_range(0, len(chain), seed)]

    @torch.no_grad()
    def forward(value: Any) -> Any:
        for layer in layers:
            value = layer(value)
        return value

    held = [state.get(name, {}) for name in chain.names]
    if any(own.keys() - layer.state_dict().keys() for layer, own in zip(layers, held, strict=True)):
        forward(value())
    for name, layer, own in zip(chain.names, layers, held, strict=True):
        load_layer(name, layer, own)
    Remembered.of_file([*zip(chain.names, layers, strict=True)], memory).put(memory)
    for layer in layers:
        layer.eval()
    return forward
