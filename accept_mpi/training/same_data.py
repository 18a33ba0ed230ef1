"""Whether a start that goes on from an earlier one has the data of that one.

What a data set's function makes may be another thing in each process: a vocabulary in the order of a set of strings, a
division into training and test samples that a generator of its own draws. A model would go on with other words, or be tested
with what it was trained on, without a word.
"""

import math
from collections.abc import Sequence

import msgspec

from accept_mpi.comm.runtime import Runtime
from accept_mpi.data.checksums import Checksum
from accept_mpi.errors import UserError
from accept_mpi.recovery.disk_replicas import DiskReplicas
from accept_mpi.recovery.manifest import Glimpse, Manifest
from accept_mpi.training.data_here import Known

_MEANT = ("data", "model.output", "train.mix")
"""Keys, or tables of them, which decide what samples are: where the command line names one, other samples are meant."""


def glimpses(known: Known) -> list[Glimpse]:
    """What is known of training samples, as a manifest keeps it."""
    return [
        Glimpse(n, f"{one.digest:016x}", one.projection, one.norm)
        for (which, n), (_, one) in sorted(known.items())
        if which == "training" and math.isfinite(one.norm)
    ]


def go_on_with_data(
    runtime: Runtime, known: Known, manifest: Manifest | None, disk: DiskReplicas | None, overrides: Sequence[str]
) -> None:
    """Compare what this start ``known`` of its data with what the one had from whose state it goes on. All ranks call this
    together. ``overrides``: the command line's changes. Raises Agreed if the data are others, and that is not named."""
    earlier = _shared(runtime, disk) if manifest is None else manifest.glimpses
    runtime.agree("the data", lambda: check_data(earlier, known, overrides))


def check_data(earlier: Sequence[Glimpse], known: Known, overrides: Sequence[str]) -> None:
    """Raise UserError if a sample is another one than it was, unless the command line's changes name what decides that."""
    named = (override.partition("=")[0].strip() for override in overrides)
    if any(key == one or key.startswith(f"{one}.") for key in named for one in _MEANT):
        return
    for one in earlier:
        now = known.get(("training", one.sample))
        if now and not now[1].matches(Checksum(int(one.digest, 16), one.projection, one.norm)):
            raise UserError(
                f"data.name: sample {one.sample} of the training set is another one than in the run that is to go on: files "
                "or code have changed, or what data.name makes depends on the order of a set, the time or a generator "
                "without a seed; where that is meant, name it with --resume: --set data.name=..."
            )


def _shared(runtime: Runtime, disk: DiskReplicas | None) -> list[Glimpse]:
    """What any host has kept of an earlier start's data."""
    mine = disk.glimpses() if disk else None
    for kept in runtime.messenger.allgather(mine, runtime.startup_seconds, "what an earlier start's data were"):
        if kept is not None:
            try:
                return msgspec.convert(kept, list[Glimpse])
            except msgspec.ValidationError:  # a damaged file
                continue
    return []
