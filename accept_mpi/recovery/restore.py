"""Finds the state that a deployment begins with, and moves layers' states to the ranks that need them, peer to peer.

The states are in the memory of ranks (``replicas``), or in a checkpoint on rank 0's disk.
"""

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from accept_mpi.comm.messages import LayerChunks
from accept_mpi.comm.messenger import POLL_SECONDS, Messenger, Sending
from accept_mpi.comm.runtime import Runtime
from accept_mpi.errors import DeadlineError
from accept_mpi.failpoints import failpoint
from accept_mpi.plan import Plan
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.recovery.layer_state import Arriving, Blobs, chunked, pack
from accept_mpi.recovery.replicas import Holdings, Replicas, newest, sources

_PIECE = 1 << 18  # bytes per message
_AT_ONCE = 4  # messages in flight from one rank


class Origin(NamedTuple):
    """The snapshot that a deployment begins with, as all ranks know it."""

    step: int
    """Number of steps made; 0: weights as the seed makes them, no state to load."""
    held: list[Holdings]
    """The layers that each rank holds, by rank."""
    on_disk: bool
    """True if it is the checkpoint on rank 0's disk."""


class CheckpointStore:
    """The states of a checkpoint's layers, with the interface of ``Replicas``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def get(self, step: int, layer: int) -> bytes:
        """State of ``layer`` after ``step`` steps, which must be the checkpoint's."""
        assert step == self.checkpoint.manifest.step
        one = range(layer, layer + 1)
        return pack(self.checkpoint.tensors("weights", one), self.checkpoint.tensors("optimizer", one))


def newest_snapshot(runtime: Runtime, replicas: Replicas, disk_step: int, layers: int) -> Origin:
    """The newest snapshot that has a copy of every layer somewhere; all ranks call this together. ``disk_step``: the step of
    rank 0's checkpoint, 0 if there is none."""
    mine = [replicas.holdings(), disk_step]
    told = runtime.messenger.allgather(mine, runtime.startup_seconds, "the snapshots that each rank holds")
    held = [msgspec.convert(holdings, Holdings, strict=False) for holdings, _ in told]
    step, disk_step = newest(held, layers) or 0, told[0][1]
    if disk_step > step:
        return Origin(disk_step, [{disk_step: list(range(layers))}] + [{} for _ in told[1:]], True)
    return Origin(step, held, False)


def fetch(messenger: Messenger, plan: Plan, origin: Origin, store: Replicas | CheckpointStore, seconds: float) -> Blobs:
    """The states of the layers that ``plan`` gives to this rank. Meanwhile it sends those that others need; all ranks call
    this together. ``seconds``: time without any progress after which it raises DeadlineError."""
    failpoint("move")
    rank, step = messenger.rank, origin.step
    wanted = [plan.layers_of(r) for r in range(messenger.size)]
    moves = sources(origin.held, step, wanted)
    found = {layer: store.get(step, layer) for layer in wanted[rank] if layer in origin.held[rank].get(step, ())}
    # Serve one receiver after another, so that rank 0 need not hold what all of them wait for.
    pieces = (
        (dest, LayerChunks(piece))
        for (source, dest), layers in sorted(moves.items())
        if source == rank
        for piece in chunked({layer: store.get(step, layer) for layer in layers}, _PIECE)
    )
    coming = {source: len(layers) for (source, dest), layers in moves.items() if dest == rank}
    for blobs in _exchange(messenger, pieces, coming, seconds):
        found |= blobs
    return found


def _exchange(
    messenger: Messenger, pieces: Iterator[tuple[int, LayerChunks]], coming: dict[int, int], seconds: float
) -> list[Blobs]:
    """Send ``pieces``, several at once, and meanwhile receive as many layers from each rank as ``coming`` says, since links
    carry both directions at once. Raises DeadlineError if nothing moves for ``seconds``."""
    arriving = {source: Arriving() for source in coming}
    missing, later = set(coming), []
    under_way: deque[Sending] = deque()
    piece = next(pieces, None)
    until = time.monotonic() + seconds
    while missing or under_way or piece:
        moved = False
        while piece and len(under_way) < _AT_ONCE:
            under_way.append(messenger.begin(*piece))
            piece = next(pieces, None)
        for message in messenger.poll():
            if isinstance(message.control, LayerChunks) and message.source in missing:
                arriving[message.source].add(message.control.chunks)
                if len(arriving[message.source].whole) == coming[message.source]:
                    missing.remove(message.source)
                moved = True
            else:
                later.append(message)
        while under_way and under_way[0].took is not None:
            under_way.popleft()
            moved = True
        if moved:
            until = time.monotonic() + seconds
        elif time.monotonic() > until:
            what = f"the state of layers from rank {min(missing)}" if missing else "another rank to take layers"
            raise DeadlineError(f"rank {messenger.rank} waited {seconds:.0f} s for {what}")
        else:
            time.sleep(POLL_SECONDS)
    messenger.keep(later)
    return [one.whole for one in arriving.values()]
