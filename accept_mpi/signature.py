"""Agreement on what crosses each boundary: shapes, dtypes and strides, once per plan.

Every stage runs one forward and backward for each size that a micro-batch can have, on data of the right shape, and tells
its neighbours the specs of what it gives. That also builds the kernels' caches before the first step is timed.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from accept_mpi.codec import Signature, Specs, Tensors, TensorSpec
from accept_mpi.comm.messenger import Messenger
from accept_mpi.data import Dataset
from accept_mpi.plan import Place
from accept_mpi.stage import Stage


def agree_on_shapes(
    messenger: Messenger,
    stage: Stage,
    place: Place,
    sizes: tuple[Sequence[int], Sequence[int]],
    train: Dataset | None,
    deadline: float,
) -> tuple[Signature, Signature]:
    """Signatures of the boundary before and of the one after ``stage``; empty ones at the ends, and for an idle rank.

    ``sizes``: numbers of samples a micro-batch can have, in training and in evaluation. ``train`` is needed on the first
    and the last stage.
    """
    behind, ahead = Signature({}, {}), Signature({}, {})
    before, after = place.before, place.after
    if place.idle:
        return behind, ahead
    training, evaluation = sizes
    for size in dict.fromkeys([*training, *evaluation]):
        sample = torch.arange(size).numpy() % (len(train) if train is not None else 1)
        target = train.targets(sample) if after is None and train is not None else None
        if before is None:
            assert train is not None
            inputs: Tensors = stage.from_data(train.inputs(sample))
        else:
            behind.forward[size] = _hear(messenger, before, "activations", size, deadline)
            inputs = tuple(spec.zeros() for spec in behind.forward[size])

        def gradients_of(outputs: Sequence[TensorSpec], size: int = size) -> Tensors:
            if after is None:
                return ()
            ahead.forward[size] = tuple(outputs)
            _tell(messenger, after, "activations", outputs)
            ahead.backward[size] = _hear(messenger, after, "gradients", size, deadline)
            return tuple(spec.zeros() for spec in ahead.backward[size])

        if size not in training:  # forward only: BatchNorm may refuse to train on it
            with stage.evaluating():
                outputs, _ = stage.evaluate(inputs, target)
            if after is not None:
                ahead.forward[size] = tuple(TensorSpec.of(out) for out in outputs)
                _tell(messenger, after, "activations", ahead.forward[size])
            continue
        gradients = stage.probe(inputs, target, gradients_of)
        if before is not None:
            behind.backward[size] = gradients
            _tell(messenger, before, "gradients", gradients)
    messenger.flush(deadline, "the shapes at this stage's boundaries")
    return behind, ahead


def _tell(messenger: Messenger, peer: int, what: str, specs: Sequence[TensorSpec]) -> None:
    messenger.send(peer, f"{what} specs", msgspec.to_builtins(list(specs)))


def _hear(messenger: Messenger, peer: int, what: str, size: int, deadline: float) -> Specs:
    body: Any = messenger.expect(f"{what} specs", {peer}, deadline, f"the shapes of {what} for {size} samples")[peer]
    return msgspec.convert(body, tuple[TensorSpec, ...])
