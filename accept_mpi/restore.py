"""Where layers' states come from when a term begins, and how they get to the ranks that need them: peer to peer.

They lie in ranks' memory (``replicas``), or in a checkpoint on rank 0's disk.
"""

from typing import NamedTuple

import msgspec

from accept_mpi.comm.messenger import Messenger
from accept_mpi.comm.runtime import Runtime
from accept_mpi.faults import pass_by
from accept_mpi.plan import Plan
from accept_mpi.replicas import Holdings, Replicas, newest, pack, sources
from accept_mpi.snapshot import Checkpoint
from accept_mpi.spill import Blobs

_PIECE = 1 << 20


class Origin(NamedTuple):
    """A snapshot that all ranks know of."""

    step: int
    """0: weights as the seed makes them, no state to load."""
    held: list[Holdings]
    """By rank."""
    on_disk: bool


class Stored:
    """A checkpoint's layers as ``Replicas`` gives them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def get(self, step: int, layer: int) -> bytes:
        assert step == self.checkpoint.manifest.step
        one = range(layer, layer + 1)
        return pack(self.checkpoint.tensors("weights", one), self.checkpoint.tensors("optimizer", one))


def origin(runtime: Runtime, replicas: Replicas, disk_step: int, layers: int) -> Origin:
    """The newest snapshot that every layer still has a copy of. ``disk_step``: of rank 0's checkpoint, 0: it has none."""
    mine = [replicas.holdings(), disk_step]
    told = runtime.messenger.allgather(mine, runtime.startup_seconds, "the snapshots that each rank holds")
    held = [msgspec.convert(holdings, Holdings, strict=False) for holdings, _ in told]
    step, disk_step = newest(held, layers) or 0, told[0][1]
    if disk_step > step:
        return Origin(disk_step, [{disk_step: list(range(layers))}] + [{} for _ in told[1:]], True)
    return Origin(step, held, False)


def fetch(messenger: Messenger, plan: Plan, origin: Origin, store: Replicas | Stored, seconds: float) -> Blobs:
    """The states of this rank's layers; what others need of this rank's goes to them. All ranks together."""
    pass_by("move")
    rank, step = messenger.rank, origin.step
    wanted = [plan.layers_of(r) for r in range(messenger.size)]
    moves = sources(origin.held, step, wanted)
    found = {layer: store.get(step, layer) for layer in wanted[rank] if layer in origin.held[rank].get(step, ())}
    for (source, dest), layers in sorted(moves.items()):
        if source == rank:  # one receiver after another: rank 0 need not hold what all wait for
            _send(messenger, dest, {layer: store.get(step, layer) for layer in layers}, seconds)
    for source, dest in sorted(moves):
        if dest == rank:
            found |= _receive(messenger, source, seconds)
    messenger.flush(seconds, "the layers that other ranks need")
    return found


def _send(messenger: Messenger, dest: int, blobs: Blobs, seconds: float) -> None:
    data = msgspec.msgpack.encode(blobs)
    messenger.send(dest, "layers bytes", len(data))
    for offset in range(0, len(data), _PIECE):
        messenger.send(dest, "layers", data[offset : offset + _PIECE])
        messenger.flush(seconds, f"layers for rank {dest}")


def _receive(messenger: Messenger, source: int, seconds: float) -> Blobs:
    awaited = "the state of layers"
    total = messenger.expect("layers bytes", {source}, seconds, awaited)[source]
    data = bytearray()
    while len(data) < total:
        data += messenger.expect("layers", {source}, seconds, awaited)[source]
    return msgspec.msgpack.decode(data, type=Blobs)
