"""All control messages between ranks, as typed structs; each says who sends it to whom, and when.

A message is encoded as its struct's name and fields in MessagePack (``comm.messenger``). While a run is set up, the main
thread waits for messages by type (``Messenger.expect``); while a deployment runs, the data-plane thread passes each one to
the part that handles it.
"""

from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from accept_mpi.logs.observers import Evaluated, StepDone
from accept_mpi.tree import Tree


class Control(msgspec.Struct, frozen=True, tag=True):
    """A control message."""

    urgent: ClassVar[bool] = False
    """True if training waits for it, so that it must not queue behind a checkpoint."""


# Messages while a run is set up, handled by the code that waits for them.


class Gather(Control, frozen=True):
    """Each rank to rank 0: its value for ``Messenger.allgather``."""

    value: Any


class Scatter(Control, frozen=True):
    """Rank 0 to each rank: all ranks' values, in the order of ranks."""

    values: list[Any]


class MachineCode(Control, frozen=True):
    """A rank that has kernels' machine code to one that lacks it (``comm.machine_code``)."""

    packed: bytes
    """For each module its files by name, in MessagePack, deflated; empty if both ranks use the same cache."""


class Shapes(Control, frozen=True):
    """A stage to its neighbour, when stages find their shapes one after the other (``training.boundaries``)."""

    of: str
    """"activations" or "gradients"."""
    specs: Any
    """As ``list[TensorSpec]``."""
    tree: Tree
    whole: tuple[bytes, ...] = ()
    """Of activations, ``trial_values`` of each."""
    failed: bool = False
    """A stage's layers have raised: there is nothing to tell of."""


class LayerChunks(Control, frozen=True):
    """A rank that has layers' state to one that needs it, before a deployment begins (``recovery.restore``)."""

    chunks: Any
    """As ``list[layer_state.Chunk]``."""


# Messages while a deployment runs, handled on rank 0 by ``training.controller.Controller`` ...


class CheckpointChunk(Control, frozen=True):
    """Each stage to rank 0: a part of one of its two checkpoint files."""

    step: int
    stage: int
    part: Literal["weights", "optimizer"]
    total: int
    """Size of the whole file in bytes."""
    data: Any
    """A part of the file, as bytes."""


class StepMade(Control, frozen=True):
    """The last stage to rank 0, after each step."""

    report: StepDone


class EvaluationMade(Control, frozen=True):
    """The last stage to rank 0, after an evaluation."""

    report: Evaluated


class TraceRows(Control, frozen=True):
    """Each rank to rank 0, about once per second: rows of dtype ``logs.format.TRACE``."""

    rows: bytes


class Event(Control, frozen=True):
    """Any rank to rank 0: a row for the log's table of events."""

    seconds: float
    step: int
    text: str


class Stopping(Control, frozen=True):
    """The first stage to rank 0: a signal ends the run after this step, with a checkpoint."""

    step: int


class Leaving(Control, frozen=True):
    """Each rank to rank 0, as its last message: the number of steps that it has made, and whether the last of them ended
    the run before its time."""

    steps_made: int
    over: bool = False


class Speed(Control, frozen=True):
    """A rank that mostly waits to rank 0: factor by which its device has become slower (``device.speed_check``)."""

    factor: float


# ... by ``comm.clock_check.ClockCheck``.


class ClockAsked(Control, frozen=True):
    """A rank that holds a stage to rank 0, now and then: what time is it?"""

    urgent: ClassVar[bool] = True
    asked: float
    """Seconds since the run began, on the rank's own clock."""


class ClockTold(Control, frozen=True):
    """Rank 0 in answer."""

    urgent: ClassVar[bool] = True
    asked: float
    told: float
    """The same on rank 0's clock."""


# ... on the other ranks by ``training.controller.Follower``.


class PlanOver(Control, frozen=True):
    """Rank 0 to each rank that the plan leaves idle: all stages have left, after ``steps_made`` steps."""

    steps_made: int


# ... by ``recovery.replication.Replication`` and ``recovery.barriers.Barriers``.


class ReplicaChunks(Control, frozen=True):
    """A stage to the next stage's rank, in the background: a part of its state after ``step``, where that differs from the
    copy before."""

    step: int
    stage: int
    layers: int
    """Number of layers in the stage, all of which will follow."""
    chunks: Any
    """As ``list[layer_state.Chunk]``."""


class Replicated(Control, frozen=True):
    """A rank to rank 0: it has received all of a stage's state after ``step``, or keeps its own as a member of a group."""

    step: int
    stage: int
    member: int = 0
    """Index of the rank in the group."""


class Copied(Control, frozen=True):
    """A rank to the first stage's leader: what a local copy of its stage's state took."""

    stage: int
    seconds: float


class Committed(Control, frozen=True):
    """Rank 0 to all: every stage's state after ``step`` has a copy, so older copies may be dropped."""

    step: int


class StopAsked(Control, frozen=True):
    """Any rank to the first stage: a signal asks for a checkpoint and the end."""


class ReplanAsked(Control, frozen=True):
    """Rank 0 to the first stage: a better plan is ready, so end this deployment after the next step; or, if ``over``, the
    run."""

    over: bool = False


class StepFlags(Control, frozen=True):
    """The first stage's leader to all that hold one, if groups do: how a step will end (``recovery.barriers``), some steps
    before it begins."""

    urgent: ClassVar[bool] = True
    step: int
    flags: int


# ... and on the last stage by ``data.feed.Drawn`` and ``training.reports.Reports``.


class TargetsDrawn(Control, frozen=True):
    """The first stage to the last: checksums of the targets that a rank drew for a step, by micro-batch."""

    urgent: ClassVar[bool] = True
    step: int
    """``~step``: for the evaluation after so many steps."""
    sums: dict[int, tuple[int, float, float]]
    """As ``data.checksums.Checksum``."""


class GradientNorms(Control, frozen=True):
    """A stage to all others: norms of its parameters' gradients in a step (``kept_norms.Norms``)."""

    urgent: ClassVar[bool] = True
    step: int
    stage: int
    norms: list[tuple[int, float, str]]


class MemberResults(Control, frozen=True):
    """A rank of the last stage to the stage's leader: results of some micro-batches."""

    step: int
    """Counted from 1."""
    evaluation: bool
    """True for the evaluation after the step."""
    results: dict[int, Any]
    """As ``models.losses.Result``, by micro-batch."""


AnyControl = (
    Gather | Scatter | MachineCode | Shapes | LayerChunks | CheckpointChunk | StepMade | EvaluationMade | TraceRows | Event
    | Stopping | Leaving | Speed | PlanOver | ReplicaChunks | Replicated | Committed | Copied | StopAsked | ReplanAsked
    | StepFlags | TargetsDrawn | MemberResults | GradientNorms | ClockAsked | ClockTold
)  # fmt: skip


class Message(NamedTuple):
    """A control message as received."""

    source: int
    """The rank that sent it."""
    control: Control
