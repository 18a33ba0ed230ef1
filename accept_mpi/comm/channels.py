"""Channels: one direction of one boundary, as queues between the computing thread and the data plane.

Messages have the format that both ends agreed on, or describe how they differ.
"""

import contextlib
import queue
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

from accept_mpi.codecs.basis import Bases, no_bases
from accept_mpi.codecs.coding import NONE, Coding
from accept_mpi.codecs.message import (
    Header,
    buffer_bytes,
)
from accept_mpi.codecs.tensors import Specs
from accept_mpi.direction import Direction
from accept_mpi.errors import DeadlineError
from accept_mpi.logs.recorder import Subject
from accept_mpi.tree import Tree

_T = TypeVar("_T")


class Plane(Protocol):
    """The part of ``data_plane.DataPlane`` that channels use."""

    def hurry(self, awaited: bool) -> None: ...

    def check(self) -> None: ...

    def wake(self) -> None: ...

    def report_uncoded(self, header: Header, end: "Channel") -> None: ...


def wait_for(plane: Plane, box: "queue.SimpleQueue[_T]", deadline: float, what: str) -> _T:
    """What the data plane puts into a queue; while this waits, it polls more often. Raises DeadlineError after ``deadline``
    seconds, or the error that ended the data plane."""
    with contextlib.suppress(queue.Empty):
        return box.get_nowait()
    plane.hurry(True)
    plane.wake()
    try:
        return box.get(timeout=deadline)
    except queue.Empty:
        plane.check()
        raise DeadlineError(f"waited {deadline:.0f} s for {what}") from None
    finally:
        plane.hurry(False)


class Channel(NamedTuple):
    """One direction of one boundary, as seen from one rank; ``peer`` is the rank at the other end."""

    peer: int
    boundary: int
    direction: Direction
    specs: dict[int, Specs]
    limit: int
    """Maximum number of messages that the schedule can leave waiting."""
    coding: Coding = NONE
    seed: int = 0
    """The job's seed, for stochastic rounding."""
    trees: Mapping[int, Tree] = MappingProxyType({})
    """Structures of activations, by the number of samples."""
    bases: Callable[[int], Bases] = no_bases
    """Those in which the activations of a step are coded, where they are sent."""
    in_group: bool = False
    """True for messages between members of a group, which cross no boundary (``group_sum``)."""

    @property
    def in_place(self) -> bool:
        """True if messages are sent from where their tensors are, and received where these stay: nobody changes a group's
        chunks of gradients."""
        return self.in_group and self.coding.kind == "none"

    @property
    def tag(self) -> int:
        """MPI tag of the channel's messages."""
        return 2 * self.boundary + self.direction

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the largest message in the format agreed on."""
        return max(buffer_bytes(specs, self.coding) for specs in self.specs.values())

    def subject(self, step: int, micro_batch: int, raw: int = 0, wire: int = 0) -> Subject:
        """What a trace row about a message is about. ``step``: from 0; ``raw``, ``wire``: bytes uncoded and coded."""
        place = (-1, -1) if self.in_group else (self.boundary, self.direction)
        return Subject(step + 1, micro_batch, *place, raw, wire)

    def __str__(self) -> str:
        return "gradients of its stage" if self.in_group else f"{self.direction.tensors} across boundary {self.boundary}"
