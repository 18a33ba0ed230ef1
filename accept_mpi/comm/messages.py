"""Every control message between ranks, as a typed struct: who sends it to whom, and when.

A message is its struct's name and fields in MessagePack, with the sender's rank beside it (``comm.messenger``). While a run
is set up the main thread waits for messages by type (``Messenger.expect``); while a deployment runs the data-plane thread
hands each one to the part that handles it.
"""

from typing import Any, Literal, NamedTuple

import msgspec

from accept_mpi.tree import Tree


class Control(msgspec.Struct, frozen=True, tag=True):
    """A control message."""


# While a run is set up, handled by whoever waits for them.


class Gather(Control, frozen=True):
    """Each rank to rank 0: its value for ``Messenger.allgather``."""

    value: Any


class Scatter(Control, frozen=True):
    """Rank 0 to each rank: all ranks' values, in the order of ranks."""

    values: list[Any]


class Shapes(Control, frozen=True):
    """A stage to its neighbour, when stages find their shapes one after the other (``training.boundaries``)."""

    of: str
    """"activations" or "gradients"."""
    specs: Any
    """As ``list[TensorSpec]``."""
    tree: Tree


class LayerChunks(Control, frozen=True):
    """A rank that has layers' state to one that needs it, before a deployment begins (``recovery.restore``)."""

    chunks: Any
    """As ``list[layer_state.Chunk]``."""


# While a deployment runs, handled on rank 0 by ``training.controller.Controller``.


class CheckpointChunk(Control, frozen=True):
    """Each stage to rank 0: some bytes of one of its two files of a checkpoint."""

    step: int
    stage: int
    part: Literal["weights", "optimizer"]
    total: int
    """Bytes of the whole file."""
    data: Any
    """Bytes."""


class StepMade(Control, frozen=True):
    """The last stage to rank 0, after each step: the fields of ``logs.observers.StepDone``."""

    step: int
    epoch: int
    samples: int
    loss: float
    accuracy: float
    lr: float
    end: float
    samples_per_s: float


class EvaluationMade(Control, frozen=True):
    """The last stage to rank 0, after an evaluation: the fields of ``logs.observers.Evaluated``."""

    step: int
    epoch: int
    samples: int
    loss: float
    accuracy: float
    end: float


class TraceRows(Control, frozen=True):
    """Each rank to rank 0, about once per second: rows of dtype ``logs.format.TRACE``."""

    rows: bytes


class Event(Control, frozen=True):
    """Any rank to rank 0: something for the log's table of events."""

    seconds: float
    step: int
    text: str


class Stopping(Control, frozen=True):
    """The first stage to rank 0: a signal ends the run, with a checkpoint after this step."""

    step: int


class Leaving(Control, frozen=True):
    """Each rank to rank 0, last of all: it has made so many steps and will send nothing more."""

    steps_made: int


class Speed(Control, frozen=True):
    """A rank that mostly waits to rank 0: by which factor its device is slower than at first (``device.speed_check``)."""

    factor: float


# ... on the other ranks by ``training.controller.Follower``.


class PlanOver(Control, frozen=True):
    """Rank 0 to each rank that the plan leaves idle: all have left, after so many steps."""

    steps_made: int


# ... by ``recovery.replication.Replication`` and ``recovery.barriers.Barriers``.


class ReplicaChunks(Control, frozen=True):
    """A stage to the next stage's rank, in the background: some of the state that it had after a step."""

    step: int
    stage: int
    layers: int
    """Layers of the stage, all of which will come."""
    chunks: Any
    """As ``list[layer_state.Chunk]``."""


class Replicated(Control, frozen=True):
    """A rank to rank 0: all of a stage's state after a step has arrived here."""

    step: int
    stage: int


class Committed(Control, frozen=True):
    """Rank 0 to all: every stage's state after this step has a copy; older ones are not needed any more."""

    step: int


class StopAsked(Control, frozen=True):
    """Any rank to the first stage: a signal asks for a checkpoint and the end."""


class ReplanAsked(Control, frozen=True):
    """Rank 0 to the first stage: a better plan waits; let this one end with the next step."""


# ... and on the last stage by ``data.feed.Drawn``.


class TargetsDrawn(Control, frozen=True):
    """The first stage to the last: checksums of the targets that it drew for a step, one per micro-batch."""

    step: int
    sums: list[int]


AnyControl = (
    Gather | Scatter | Shapes | LayerChunks | CheckpointChunk | StepMade | EvaluationMade | TraceRows | Event | Stopping
    | Leaving | Speed | PlanOver | ReplicaChunks | Replicated | Committed | StopAsked | ReplanAsked | TargetsDrawn
)  # fmt: skip


class Message(NamedTuple):
    """A control message as received."""

    source: int
    """The rank that sent it."""
    control: Control
