"""Where layers' states come from when a term begins, and how they get to the ranks that need them: peer to peer.

They lie in ranks' memory (``replicas``), or in a checkpoint on rank 0's disk.
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

_PIECE = 1 << 18
_AT_ONCE = 4  # pieces under way from one rank


class Origin(NamedTuple):
    """A snapshot that all ranks know of."""

    step: int
    """0: weights as the seed makes them, no state to load."""
    held: list[Holdings]
    """By rank."""
    on_disk: bool


class CheckpointStore:
    """A checkpoint's layers as ``Replicas`` gives them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def get(self, step: int, layer: int) -> bytes:
        assert step == self.checkpoint.manifest.step
        one = range(layer, layer + 1)
        return pack(self.checkpoint.tensors("weights", one), self.checkpoint.tensors("optimizer", one))


def newest_snapshot(runtime: Runtime, replicas: Replicas, disk_step: int, layers: int) -> Origin:
    """The newest snapshot that every layer still has a copy of. ``disk_step``: of rank 0's checkpoint, 0: it has none."""
    mine = [replicas.holdings(), disk_step]
    told = runtime.messenger.allgather(mine, runtime.startup_seconds, "the snapshots that each rank holds")
    held = [msgspec.convert(holdings, Holdings, strict=False) for holdings, _ in told]
    step, disk_step = newest(held, layers) or 0, told[0][1]
    if disk_step > step:
        return Origin(disk_step, [{disk_step: list(range(layers))}] + [{} for _ in told[1:]], True)
    return Origin(step, held, False)


def fetch(messenger: Messenger, plan: Plan, origin: Origin, store: Replicas | CheckpointStore, seconds: float) -> Blobs:
    """The states of this rank's layers; what others need of this rank's goes to them meanwhile. All ranks together."""
    failpoint("move")
    rank, step = messenger.rank, origin.step
    wanted = [plan.layers_of(r) for r in range(messenger.size)]
    moves = sources(origin.held, step, wanted)
    found = {layer: store.get(step, layer) for layer in wanted[rank] if layer in origin.held[rank].get(step, ())}
    # One receiver after another: rank 0 need not hold what all wait for.
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
    """Send pieces, several at once, while so many layers of each rank in ``coming`` arrive; links carry both ways at once.
    Raises DeadlineError where nothing moves for so many seconds."""
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
