"""Agreement on what crosses each boundary: shapes, dtypes and strides, once per plan.

Every stage runs one forward and backward for each size that a micro-batch can have, on data of the right shape. That also
builds the kernels' caches before the first step is timed. What stages take is known only when those before have run. But
where the model's outline is there, all of them try at the same time with what it suggests, and tell each other what came
out; only if that does not fit, one begins after the other.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from accept_mpi.codec import Signature, Specs, Tensors, TensorSpec
from accept_mpi.comm.messenger import Messenger
from accept_mpi.data import Dataset
from accept_mpi.outline import Outline
from accept_mpi.plan import Place
from accept_mpi.stage import Stage

Sizes = tuple[Sequence[int], Sequence[int]]
"""Numbers of samples a micro-batch can have, in training and in evaluation."""


def agree_on_shapes(
    messenger: Messenger,
    stage: Stage,
    place: Place,
    sizes: Sizes,
    train: Dataset | None,
    deadline: float,
    outline: Outline | None = None,
) -> tuple[Signature, Signature]:
    """Signatures of the boundary before and of the one after ``stage``; empty ones at the ends, and for an idle rank.

    ``train`` is needed on the first and the last stage. All ranks call this together.
    """
    if found := _all_at_once(messenger, stage, place, sizes, train, deadline, outline):
        return found
    behind, ahead = Signature({}, {}), Signature({}, {})
    before, after = place.before, place.after
    if place.idle:
        return behind, ahead

    def taken(size: int, training: bool) -> Specs:
        assert before is not None
        return _hear(messenger, before, "activations", size, deadline)

    def returned(size: int, training: bool, outputs: Specs) -> Specs:
        assert after is not None
        _tell(messenger, after, "activations", outputs)
        return _hear(messenger, after, "gradients", size, deadline) if training else ()

    for size in dict.fromkeys([*sizes[0], *sizes[1]]):
        gradients = _run(stage, place, train, size, size in sizes[0], (behind, ahead), taken, returned)
        if before is not None and size in sizes[0]:
            _tell(messenger, before, "gradients", gradients)
    messenger.flush(deadline, "the shapes at this stage's boundaries")
    return behind, ahead


def _run(
    stage: Stage,
    place: Place,
    train: Dataset | None,
    size: int,
    training: bool,
    signatures: tuple[Signature, Signature],
    taken: Callable[[int, bool], Specs],
    returned: Callable[[int, bool, Specs], Specs],
) -> Specs:
    """Let the stage run on so many samples, and write down in ``signatures`` what it takes and gives.

    ``taken`` says what comes in over the boundary behind, ``returned`` what comes back for outputs. Returns the specs of the
    inputs' gradients.
    """
    behind, ahead = signatures
    sample = torch.arange(size).numpy() % (len(train) if train is not None else 1)
    target = train.targets(sample) if place.last and train is not None else None
    if place.first:
        assert train is not None
        inputs: Tensors = stage.from_data(train.inputs(sample))
    else:
        behind.forward[size] = taken(size, training)
        inputs = tuple(spec.zeros() for spec in behind.forward[size])

    def gradients_of(outputs: Sequence[TensorSpec]) -> Tensors:
        if place.last:
            return ()
        ahead.forward[size] = tuple(outputs)
        back = returned(size, training, ahead.forward[size])
        if training:
            ahead.backward[size] = back
        return tuple(spec.zeros() for spec in back)

    if not training:  # forward only: BatchNorm may refuse to train on it
        with stage.evaluating():
            outputs, _ = stage.evaluate(inputs, target)
        gradients_of([TensorSpec.of(out) for out in outputs])
        return ()
    gradients = stage.probe(inputs, target, gradients_of)
    if not place.first:
        behind.backward[size] = gradients
    return gradients


# -- all stages at the same time -------------------------------------------------------------------------------------------


_IDLE = "idle"


class _Tried(msgspec.Struct, frozen=True):
    """What came out of a stage, by size, and what was assumed to come in."""

    stage: int
    taken: dict[int, Specs]
    given: dict[int, Specs]
    back: dict[int, Specs]
    """Gradients that were assumed to come back for what it gives."""
    returned: dict[int, Specs]


def _all_at_once(
    messenger: Messenger,
    stage: Stage,
    place: Place,
    sizes: Sizes,
    train: Dataset | None,
    deadline: float,
    outline: Outline | None,
) -> tuple[Signature, Signature] | None:
    """The signatures, where every stage took what the one before gave; else nothing, on all ranks alike."""
    behind, ahead = Signature({}, {}), Signature({}, {})
    mine: Any = _IDLE if place.idle else None
    if outline is not None and not place.idle:
        come = outline.layers[stage.start].inputs, outline.samples
        with contextlib.suppress(Exception):  # a mistake of the user's is met again, and told, one after the other
            for size in dict.fromkeys([*sizes[0], *sizes[1]]):
                _run(stage, place, train, size, size in sizes[0], (behind, ahead), _suggested(*come), _likely)
            mine = msgspec.to_builtins(_Tried(place.stage, behind.forward, ahead.forward, ahead.backward, behind.backward))
    told = messenger.allgather(mine, deadline, "the shapes at all boundaries")
    if None in told:
        return None
    stages = sorted((msgspec.convert(one, _Tried) for one in told if one != _IDLE), key=lambda one: one.stage)
    fits = all(one.given == two.taken and one.back == two.returned for one, two in itertools.pairwise(stages))
    return (behind, ahead) if fits else None


def _suggested(specs: Specs, samples: int) -> Callable[[int, bool], Specs]:
    """What an outline has for so many samples, for other numbers of them: they are the first dimension."""

    def taken(size: int, training: bool) -> Specs:
        found = []
        for spec in specs:
            shape = (size, *spec.shape[1:]) if spec.shape[:1] == (samples,) else spec.shape
            found.append(msgspec.structs.replace(spec, shape=shape, grad=spec.grad and training))
        return tuple(found)

    return taken


def _likely(size: int, training: bool, outputs: Specs) -> Specs:
    """Gradients mostly have the layout of what they are of."""
    return tuple(msgspec.structs.replace(spec, grad=False) for spec in outputs if spec.grad)


# -- one after the other ---------------------------------------------------------------------------------------------------


def _tell(messenger: Messenger, peer: int, what: str, specs: Sequence[TensorSpec]) -> None:
    messenger.send(peer, f"{what} specs", msgspec.to_builtins(list(specs)))


def _hear(messenger: Messenger, peer: int, what: str, size: int, deadline: float) -> Specs:
    body: Any = messenger.expect(f"{what} specs", {peer}, deadline, f"the shapes of {what} for {size} samples")[peer]
    return msgspec.convert(body, tuple[TensorSpec, ...])
