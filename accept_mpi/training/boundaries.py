"""Agreement on what crosses each boundary: shapes, dtypes, strides and the tree that they belong to, once per plan.

A message itself says where its micro-batch differs from the agreement, so the agreement is about the usual case: it makes
messages small and their buffers large enough.

Every stage runs one forward and backward for each size that a micro-batch can have, on data of the right shape. That also
builds the kernels' caches before the first step is timed. A stage's inputs are known only after the stages before it have
run, which pass on their whole numbers (lengths, indices), since some layers do not take just any; floating-point values are
made up. Only if a layer raises on these (on what are no probabilities, on a matrix without a root), all stages run once more
on true values, which takes as long as one micro-batch takes over each link. If the model's outline is known, though, all
stages run at the same time on the inputs that it suggests and compare the results; only if these do not fit do they run one
after another.

Test samples that look unlike training's are evaluated once, too, so that nobody learns after an epoch that they cannot be.
"""

import contextlib
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import msgspec
import numpy as np
import torch

from accept_mpi import tree
from accept_mpi.codecs.tensors import BoundarySpecs, Specs, Tensors, TensorSpec, as_in_training, trial_values
from accept_mpi.comm.messages import Shapes
from accept_mpi.comm.messenger import Messenger
from accept_mpi.data import Dataset, fetch
from accept_mpi.data.mixing import unmixed
from accept_mpi.errors import Agreed, OutOfMemory, UserError, UsersBug
from accept_mpi.pipeline.common_memory import CommonMemory, why_parted
from accept_mpi.pipeline.micro_batch import Inputs
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.trials import Trial, trial_of
from accept_mpi.plan import Place
from accept_mpi.profiling.outline import LayerOutline, Outline
from accept_mpi.training.data_here import Data
from accept_mpi.tree import Tree

log = logging.getLogger(__name__)

Taken = tuple[Specs, Tree, tuple[bytes, ...]]
"""Content of a forward message: the specs of its tensors, the tree that they belong to, and ``trial_values``, if known."""

Sizes = tuple[Sequence[int], Sequence[int]]
"""Numbers of samples that a micro-batch can have, in training and in evaluation."""


def agree_on_shapes(
    messenger: Messenger,
    stage: Stage,
    place: Place,
    sizes: Sizes,
    data: Data,
    deadline: float,
    outline: Outline | None = None,
) -> tuple[BoundarySpecs, BoundarySpecs]:
    """Agree with the neighbours on the specs of the boundaries before and after ``stage``; returns both. They are empty at
    the ends of the pipeline and on an idle rank. All ranks call this together.

    ``data``: needed on the first and the last stage; ``deadline``: seconds to wait for others; ``outline``: the model's,
    if it is known.
    """
    train, test = data
    found = _all_at_once(messenger, stage, place, sizes, train, deadline, outline)
    found = found or _one_by_one(messenger, stage, place, sizes, train, deadline)
    for one in found:
        usual = next((one.forward[size] for size in sizes[0] if size in one.forward), ())
        one.forward.update({n: as_in_training(specs, usual) for n, specs in one.forward.items() if n not in sizes[0]})
    if sizes[1]:
        unlike = messenger.allgather(_unlike(place, train, test), deadline, "whether test samples are like the others")
        if any(unlike):
            try:
                _one_by_one(messenger, stage, place, ((), sizes[1][:1]), test, deadline, seed=None)
            except UserError as error:
                raise UserError(f"data.name: the test set cannot be evaluated: {error}") from error
    _agree_on_stages(messenger, stage, place, deadline)
    if place.last and place.leads and stage.loss and stage.loss.looked_at == [False] and stage.job.train.micro_batches != 1:
        _warn(stage.loss.name)
    return found


@lru_cache
def _warn(loss: str) -> None:
    """Say once that results depend on which samples are in a micro-batch together."""
    log.warning(
        'train.loss: "%s" of several samples is not the mean of what it is of each: if it compares samples with others, '
        "it does so within micro-batches (train.micro_batches = 1: within the whole batch); if some count more than "
        "others, have it return (sum, count), of which a step's loss is the mean",
        loss,
    )


@lru_cache
def _warn_of_frozen() -> None:
    log.warning("model: no parameter is trained: each has requires_grad = False")


def _agree_on_stages(messenger: Messenger, stage: Stage, place: Place, deadline: float) -> None:
    """Raise Agreed if a stage writes into a tensor that has values in common with what an earlier one has or gives besides:
    each arrives in memory of its own. Warn if no stage trains anything."""
    mine = None if place.idle else [place.stage, stage.start, msgspec.to_builtins(stage.found.memory), bool(stage.trained)]
    told = messenger.allgather(mine, deadline, "what stages write into")
    if place.last and place.leads and not any(one[3] for one in told if one):
        _warn_of_frozen()
    every = {one[0]: (one[1], msgspec.convert(one[2], CommonMemory)) for one in reversed(told) if one}
    stages = [every[s] for s in sorted(every)]
    if found := why_parted([memory for _, memory in stages]):
        first, what = stages[found[0]][0], found[1]
        raise Agreed(
            f"pipeline.cuts: layers from {first} on write into a tensor that an earlier layer gives and that has values in "
            f"common with {what}: behind a cut each lies in memory of its own, so no cut may part them, as {first} does; "
            "let the earlier layer give a clone()"
        )


def _unlike(place: Place, train: Dataset | None, test: Dataset | None) -> bool:
    """True if the first test sample has another shape or type than the first of training."""
    if place.idle or train is None or test is None:
        return False
    ends = place.first, place.last
    return _look(cast(Hashable, train), 0, *ends) != _look(cast(Hashable, test), None, *ends)


@lru_cache(maxsize=2)  # each deployment asks anew, and a sample may take long
def _look(data: Any, seed: int | None, inputs: bool, targets: bool) -> tuple[str, str]:
    """Shapes and types of the first sample of a data set."""
    found = fetch(data, np.array([0]), seed, inputs, targets)
    return tree.describe(found.inputs), tree.describe(found.targets)


def _one_by_one(
    messenger: Messenger,
    stage: Stage,
    place: Place,
    sizes: Sizes,
    data: Dataset | None,
    deadline: float,
    seed: int | None = 0,
) -> tuple[BoundarySpecs, BoundarySpecs]:
    """As ``agree_on_shapes``: the stages run one after another, on samples of this data set; what raises on values that are
    made up does so twice, and only what raises on true ones is told."""
    for true in False, True:
        failed = False
        behind, ahead = BoundarySpecs({}, {}, {}), BoundarySpecs({}, {}, {})
        with contextlib.nullcontext() if place.idle else trial_of(stage) as trial:
            for size in dict.fromkeys([*sizes[0], *sizes[1]]) if trial else ():
                assert trial is not None
                turn = _Turn(messenger, place, deadline, size, size in sizes[0], true)
                if failed or not turn.run(trial, data, (behind, ahead), seed):
                    turn.fail()
                    failed = True
        messenger.flush(deadline, "the shapes at this stage's boundaries")
        if not any(messenger.allgather(failed, deadline, "whether layers take values that are made up")):
            break
    return behind, ahead


def _specs_of(tensors: Tensors) -> Specs:
    return tuple(map(TensorSpec.of, tensors))


class _Elsewhere(Exception):
    """The layers of another stage have raised."""


class _Turn:
    """A trial of a stage on micro-batches of one size, after that of the stage before, and before that of the stage after.
    The same messages are exchanged whether layers raise or not. The leaders of groups tell, and the other members listen,
    too."""

    def __init__(self, messenger: Messenger, place: Place, deadline: float, size: int, training: bool, true: bool) -> None:
        """``true``: pass on floating-point values, too, and let what layers raise end the run."""
        self.messenger, self.place, self.deadline = messenger, place, deadline
        self.size, self.training, self.true = size, training, true
        self._behind, self._ahead = (list(ranks) if place.leads else [] for ranks in (place.behind, place.ahead))
        self._heard = self._told = self._made_up = False

    def run(
        self, trial: Trial, data: Dataset | None, signatures: tuple[BoundarySpecs, BoundarySpecs], seed: int | None
    ) -> bool:
        """Arguments as of ``_run``. Returns False if layers of this or another stage have raised, and ``fail`` is next."""
        try:
            gradients = _run(
                trial, self.place, data, self.size, self.training, signatures, self._taken, self._returned, seed
            )
        except _Elsewhere:
            return False
        except UsersBug as error:
            if self.true or not self._made_up or isinstance(error, OutOfMemory):
                raise
            return False
        if self.training:
            self._tell(self._behind, Shapes("gradients", msgspec.to_builtins(gradients), tree.LONE))
        return True

    def fail(self) -> None:
        """Have the neighbours fail as well, in what messages are left."""
        if self.place.before is not None and not self._heard:
            with contextlib.suppress(_Elsewhere):
                self._hear(self.place.before, "activations")
        if self.place.after is not None and not self._told:
            self._tell(self._ahead, Shapes("activations", (), tree.LONE, failed=True))
            if self.training:
                with contextlib.suppress(_Elsewhere):
                    self._hear(self.place.after, "gradients")
        if self.training:
            self._tell(self._behind, Shapes("gradients", (), tree.LONE, failed=True))

    def _taken(self) -> Taken:
        """Hear what the stage before gives."""
        assert self.place.before is not None
        self._heard = True
        specs, of, values = self._hear(self.place.before, "activations")
        self._made_up = not all(values)
        return specs, of, values

    def _returned(self, outputs: Tensors, of: Tree) -> Specs:
        """Tell the stage after what this one gives, and hear which gradients come back."""
        assert self.place.after is not None
        self._told = True
        values = tuple(trial_values(one, self.true) for one in outputs)
        self._tell(self._ahead, Shapes("activations", msgspec.to_builtins(_specs_of(outputs)), of, values))
        return self._hear(self.place.after, "gradients")[0] if self.training else ()

    def _tell(self, ranks: list[int], shapes: Shapes) -> None:
        for rank in ranks:
            self.messenger.send(rank, shapes)

    def _hear(self, peer: int, what: str) -> Taken:
        """Receive the specs of ``what`` ("activations" or "gradients"). Raises _Elsewhere, DeadlineError."""
        awaited = f"the shapes of {what} for {self.size} samples"
        shapes = self.messenger.expect(Shapes, {peer}, self.deadline, awaited)[peer]
        assert shapes.of == what
        if shapes.failed:
            raise _Elsewhere
        return msgspec.convert(shapes.specs, tuple[TensorSpec, ...]), shapes.tree, shapes.whole


def _run(
    trial: Trial,
    place: Place,
    data: Dataset | None,
    size: int,
    training: bool,
    signatures: tuple[BoundarySpecs, BoundarySpecs],
    taken: Callable[[], Taken],
    returned: Callable[[Tensors, Tree], Specs],
    seed: int | None = 0,
) -> Specs:
    """Run a trial on ``size`` samples, and record in ``signatures`` (boundary behind, boundary ahead) what it takes
    and gives. Returns the specs of the inputs' gradients.

    ``taken()`` returns what arrives over the boundary behind, ``returned(outputs, tree)`` what comes back for outputs;
    ``data``, ``seed``: as for ``fetch``.
    """
    behind, ahead = signatures
    stage = trial.stage
    target, inputs = None, Inputs((), tree.LONE)
    judged: Any = None  # the targets that an evaluation would have
    if data is not None and (place.first or place.last):
        sample = torch.arange(size).numpy() % len(data)
        found = fetch(data, sample, seed, inputs=place.first, targets=place.last)
        target = judged = found.targets
        if place.last and unmixed(data) is not data:
            judged = fetch(unmixed(data), sample, seed, inputs=False, targets=True).targets
        if place.first:
            inputs = stage.from_data(found.inputs)
    if not place.first:
        behind.forward[size], behind.trees[size], behind.whole[size] = taken()
        inputs = Inputs(behind.made_up(size), behind.trees[size])

    def gradients_of(outputs: Tensors, of: Tree) -> Tensors:
        if place.last:
            return ()
        ahead.forward[size], ahead.trees[size] = _specs_of(outputs), of
        back = returned(outputs, of)
        if training:
            ahead.backward[size] = back
        return tuple(spec.made_up() for spec in back)  # zeros would leave what a backward counts as it was

    if not training:  # forward only, since BatchNorm may refuse to train on this size
        with stage.evaluating():
            out = stage.evaluate(inputs.tensors, judged, inputs.tree, samples=size)
        gradients_of(out.outputs, out.tree)
        return ()
    gradients = trial.probe(inputs.tensors, target, gradients_of, inputs.tree, size)
    trial.try_metrics(inputs.tensors, judged, inputs.tree, size)
    if not place.first:
        behind.backward[size] = gradients
    return gradients


# -- all stages at the same time -------------------------------------------------------------------------------------------


_IDLE = "idle"


class _Tried(msgspec.Struct, frozen=True):
    """Results of a stage's trial by size, and what was assumed to arrive."""

    stage: int
    taken: dict[int, Specs]
    """Inputs that were assumed to arrive from the stage before."""
    given: dict[int, Specs]
    """Outputs."""
    back: dict[int, Specs]
    """Gradients that were assumed to come back for the outputs."""
    returned: dict[int, Specs]
    """Gradients of the inputs."""
    taken_trees: dict[int, Tree]
    given_trees: dict[int, Tree]


def _all_at_once(
    messenger: Messenger,
    stage: Stage,
    place: Place,
    sizes: Sizes,
    train: Dataset | None,
    deadline: float,
    outline: Outline | None,
) -> tuple[BoundarySpecs, BoundarySpecs] | None:
    """The specs of both boundaries (as ``agree_on_shapes``) if every stage was tried with what the one before gives; else
    None, on all ranks alike."""
    behind, ahead = BoundarySpecs({}, {}, {}), BoundarySpecs({}, {}, {})
    mine: Any = _IDLE if place.idle else None
    if outline is not None and not place.idle:
        # A mistake of the user's shows again, and is reported, when the stages run one after another.
        with contextlib.suppress(Exception), trial_of(stage) as trial:
            for size in dict.fromkeys([*sizes[0], *sizes[1]]):
                training = size in sizes[0]
                come = partial(_suggested, outline.layers[stage.start], outline.samples, size, training)
                _run(trial, place, train, size, training, (behind, ahead), come, _likely)
            tried = behind.forward, ahead.forward, ahead.backward, behind.backward, behind.trees, ahead.trees
            mine = msgspec.to_builtins(_Tried(place.stage, *tried))
    told = messenger.allgather(mine, deadline, "the shapes at all boundaries")
    if None in told:
        return None
    every = [msgspec.convert(one, _Tried) for one in told if one != _IDLE]
    stages = {one.stage: one for one in every}  # one rank of each
    fits = all(one == stages[one.stage] for one in every) and all(
        one.given == two.taken and one.back == two.returned and one.given_trees == two.taken_trees
        for one, two in itertools.pairwise(stages[s] for s in sorted(stages))
    )
    return (behind, ahead) if fits else None


def _suggested(layer: LayerOutline, samples: int, size: int, training: bool) -> Taken:
    """Inputs of a layer for ``size`` samples, from its outline for ``samples`` of them, which are the first dimension."""
    found = []
    for spec in layer.inputs:
        shape = (size, *spec.shape[1:]) if spec.shape[:1] == (samples,) else spec.shape
        found.append(msgspec.structs.replace(spec, shape=shape, grad=spec.grad and training))
    return tuple(found), layer.tree or tree.packed(len(found)), ()


def _likely(outputs: Tensors, of: Tree) -> Specs:
    """Likely gradients of outputs: they mostly have the same layout as the outputs."""
    return tuple(msgspec.structs.replace(spec, grad=False) for spec in _specs_of(outputs) if spec.grad)
