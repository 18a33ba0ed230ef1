"""Where the state with which a deployment begins comes from: a checkpoint, a snapshot in the ranks' memories, or nowhere."""

import logging
import math
import time
from pathlib import Path
from typing import NamedTuple

from accept_mpi.comm.runtime import Runtime
from accept_mpi.errors import UserError
from accept_mpi.job import Optimizer
from accept_mpi.pipeline.stage import Stage
from accept_mpi.plan import Plan
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.recovery.layer_state import load
from accept_mpi.recovery.manifest import Manifest, made_by, same
from accept_mpi.recovery.restore import CheckpointStore, Origin, fetch, newest_snapshot
from accept_mpi.training.alike import agree_on_copies
from accept_mpi.training.deployment import RankState

log = logging.getLogger(__name__)


class Source(NamedTuple):
    """What a deployment goes on from."""

    checkpoint: Checkpoint | None
    """The newest checkpoint, on rank 0."""
    manifest: Manifest | None
    """That of the newest checkpoint, or of the one with which the run began; on all ranks."""
    snapshot: Origin
    """The newest state of all layers that there is."""

    @classmethod
    def newest(
        cls, runtime: Runtime, state: RankState, checkpoint: Checkpoint | None, manifest: Manifest | None
    ) -> "Source":
        """The newest of all; all ranks call this together."""
        step = checkpoint.manifest.step if checkpoint else 0
        return cls(checkpoint, manifest, newest_snapshot(runtime, state.replicas, step, len(state.chain)))

    @property
    def step(self) -> int:
        """Steps that have been made."""
        return self.snapshot.step

    @property
    def stored(self) -> Checkpoint | None:
        """The checkpoint, on rank 0, if it is what there is."""
        return self.checkpoint if self.snapshot.on_disk else None

    def run(self, this: str) -> str:
        """The run that made the state; ``this`` one if there is no checkpoint."""
        return self.manifest.run if self.manifest and self.snapshot.on_disk else this

    def __str__(self) -> str:
        return str(self.stored.path) if self.stored else "the snapshot that hosts have kept"


class Restoring:
    """Gives a stage its layers' state; all ranks call this together."""

    def __init__(self, runtime: Runtime, state: RankState, plan: Plan, source: Source, optimizer: Optimizer) -> None:
        self._runtime, self._state, self._plan, self._source = runtime, state, plan, source
        self._optimizer = optimizer
        self.fits = not source.step
        """False until the state has turned out to fit the model."""
        self.took = {"planned": time.monotonic()}
        """When (monotonic seconds) what was done."""

    def __call__(self, stage: Stage) -> None:
        """Raises Agreed if the state does not fit."""
        runtime, source, replicas = self._runtime, self._source, self._state.replicas
        self.took["tried stages"] = time.monotonic()
        if source.step:
            store = CheckpointStore(source.stored) if source.stored else replicas
            blobs = fetch(runtime.messenger, self._plan, source.snapshot, store, runtime.startup_seconds)
            runtime.agree("the checkpoint's weights", lambda: load(stage, blobs, self._optimizer))
            self.fits = True
        else:
            agree_on_copies(runtime, stage, self._plan, self._state.chain)
        replicas.back_to(source.step)
        self.took["had their layers' state"] = time.monotonic()


def newest_checkpoint(
    runtime: Runtime, resume: Path | None, directory: Path, run: str | None, origin: Manifest | None
) -> Checkpoint | None:
    """The checkpoint to go on from, on rank 0; None if there is none. ``resume``: where the user has it; ``run``: after a
    loss or a restart, the run whose newest one in the output ``directory`` counts first; ``origin``: with which it began."""
    most = sum({facts["machine_id"]: facts["memory_bytes"] or math.inf for facts in runtime.hosts}.values())
    found = made_by(directory, run) if run else []
    if resume and origin and (again := same(resume, origin)):
        found.append(again)
    for path in found:
        try:
            return Checkpoint(path, most)
        except UserError as mistake:
            log.warning("passed over: %s", mistake)
    return Checkpoint(resume, most) if resume and not origin else None
