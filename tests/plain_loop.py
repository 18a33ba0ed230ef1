"""A plain PyTorch loop over the micro-batches of a job file: what any number of ranks must compute, bit for bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from accept_mpi import tree
from accept_mpi.data import adapt
from accept_mpi.job_file import parse
from accept_mpi.models.losses import cross_entropy, mse
from accept_mpi.registry import find_function
from accept_mpi.seeds import AUGMENT, ORDER, forward_seed, init_seed, mix, seed_all, seeded


def _samples(data: Any, indices: np.ndarray, seed: int) -> tuple[Any, Any]:
    """As a DataLoader stacks them; each sample is asked for once, under a seed of its own."""
    if not hasattr(data, "__getitem__") or hasattr(data, "tensors"):
        data = adapt(data)
        return data.inputs(indices), data.targets(indices)
    pairs = []
    for i in indices.tolist():
        seed_all(mix(AUGMENT, seed, i))
        pairs.append(data[i])
    if isinstance(pairs[0], dict):
        return tree.stack(pairs), torch.stack([sample["labels"] for sample in pairs])
    return tuple(tree.stack(part) for part in zip(*pairs, strict=True))  # type: ignore[return-value]


def _built(layer: Any, index: int, seed: int) -> nn.Module:
    with seeded(init_seed(seed, index)):
        return layer if isinstance(layer, nn.Module) else layer()


def _show(parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value


def plain_loop(path: Path, *overrides: str, whole: bool = False) -> tuple[dict[str, Any], list[float]]:
    """``state_dict()`` at the end and the loss of each step. ``whole``: one forward for each batch."""
    job = parse(path.read_text(), str(path), overrides)
    train = job.train
    with seeded(train.seed):
        model = find_function(job.model.name, {}, "model.name")(**job.model.args)
    if not isinstance(model, nn.Module):
        model = nn.Sequential(*[_built(layer, index, train.seed) for index, layer in enumerate(model)])
    with seeded(0):
        data, _ = find_function(job.data.name, {}, "data.name")(**job.data.args)
    loss_of = {"cross_entropy": cross_entropy, "mse": mse}.get(train.loss) or find_function(train.loss, {}, "train.loss")
    if job.model.output == "loss":
        loss_of = lambda output, target: output  # noqa: E731
    trained = [p for p in model.parameters() if p.requires_grad]
    o = train.optimizer
    optimizer = torch.optim.SGD(trained, lr=job.lr, momentum=o.momentum, weight_decay=o.weight_decay)
    losses, per_epoch = [], -(-len(data) // train.batch_size)
    delayed = job.pipeline.schedule == "1f1b-delayed"
    parameters = list(model.parameters())
    newest = earlier = [p.detach().clone() for p in parameters]
    assert train.steps
    for step in range(train.steps):
        epoch = step // per_epoch
        order = np.random.Generator(np.random.Philox(mix(ORDER, train.seed, epoch))).permutation(len(data))
        batch = order[step % per_epoch * train.batch_size :][: train.batch_size]
        size = len(batch) if whole else -(-train.batch_size // train.micro_batches)
        total = 0.0
        if delayed:
            _show(parameters, earlier)
        for k, begin in enumerate(range(0, len(batch), size)):
            indices = batch[begin : begin + size]
            x, y = _samples(data, indices, mix(AUGMENT, train.seed, epoch))
            if isinstance(model, nn.Sequential):
                for index, layer in enumerate(model):
                    seed_all(forward_seed(train.seed, step, k, index))
                    x = layer(x)
            else:
                seed_all(forward_seed(train.seed, step, k, 0))
                if isinstance(x, dict) and job.model.output != "loss":
                    del x["labels"]
                x = model(**x) if isinstance(x, dict) else model(x)
                x = x[job.model.output or "logits"] if isinstance(x, dict) else x
            loss = loss_of(x, y)
            if isinstance(loss, tuple):
                loss = loss[0] / loss[1]
            (loss * (len(indices) / len(batch))).backward()
            total += loss.item() * len(indices) / len(batch)
        if delayed:
            _show(parameters, [value.clone() for value in newest])
        optimizer.step()
        optimizer.zero_grad()
        if delayed:
            earlier, newest = newest, [p.detach().clone() for p in parameters]
        losses.append(total)
    return model.state_dict(), losses


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, Any], names: Sequence[str] = ()) -> list[str]:
    """Names of tensors that are not the same bits; of the others' state only what is a tensor counts."""
    theirs = {name: value for name, value in theirs.items() if isinstance(value, torch.Tensor)}
    return sorted(name for name in names or theirs if name not in ours or not torch.equal(ours[name], theirs[name]))
