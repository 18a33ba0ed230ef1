"""``train`` on ranks that take themselves for hosts of one kind, of which rank 1 measures itself slower than it is. A second
look finds all of them equal (more ranks than cores could not be relied on to)."""

import sys
from typing import Any

import msgspec
from mpi4py import MPI

from accept_mpi.cli import main
from accept_mpi.profiling.layer_times import LayerTimes, TimedRange
from accept_mpi.training import auto_plan, profile_cluster

RANK = MPI.COMM_WORLD.rank
facts, time_layers = profile_cluster._facts, auto_plan.time_layers


def apart(*args: Any) -> dict[str, Any]:
    return facts(*args) | {"host": f"edge{RANK}"}


def wrong(*args: Any) -> LayerTimes:
    found = time_layers(*args)
    factor = 5.0 if RANK == 1 else 1.0
    times = {way: tuple(factor * took for took in getattr(found, way)) for way in ("forward", "backward")}
    return msgspec.structs.replace(found, **times)


def retime(*args: Any) -> list[TimedRange]:
    asked, _ = args[-2:]
    return [(start, stop, 1e-3, 2e-3) for start, stop in asked]


profile_cluster._facts, auto_plan.time_layers, profile_cluster.retime = apart, wrong, retime  # type: ignore[assignment]
sys.exit(main(["train", *sys.argv[1:]]))
