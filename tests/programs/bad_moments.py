"""Ranks that do by hand what training does, also at a bad moment; ``python bad_moments.py WHAT`` under mpirun with ULFM."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable

import torch
from mpi4py import MPI

from accept_mpi.codecs.coding import Coding
from accept_mpi.codecs.tensors import TensorSpec
from accept_mpi.comm import links as measure
from accept_mpi.comm import runtime as module
from accept_mpi.comm.channels import Channel
from accept_mpi.comm.data_plane import DataPlane
from accept_mpi.comm.messages import LayerChunks
from accept_mpi.comm.runtime import Runtime
from accept_mpi.logs.recorder import Recorder

LONG = 300.0
"""Seconds that nothing takes."""
PAUSES = 20


def revoked(runtime: Runtime) -> None:
    """A rank that only looks for messages hears that the circle is broken."""
    until = time.monotonic() + LONG
    try:
        if runtime.rank == 1:
            runtime.circle.revoke()
        while time.monotonic() < until:
            runtime.messenger.poll()
            time.sleep(0.001)
    except MPI.Exception:
        runtime.regroup()
        print("heard", flush=True)


def late(runtime: Runtime) -> None:
    """One rank is done while another still has something for it."""
    recorder = Recorder(runtime.clock, runtime.rank, runtime.rank, runtime.members)
    plane = DataPlane(runtime.circle.data, runtime.messenger, recorder, lambda message: True)
    plane.start()
    if runtime.rank == 0:
        time.sleep(0.5)
        plane.post(1, LayerChunks(b"x" * (1 << 16)), True)
        time.sleep(0.2)
    plane.stop(LONG)
    assert runtime.all_done()
    print("done", flush=True)


def twice(runtime: Runtime) -> None:
    """Another loss while the ranks regroup: those that have regrouped live."""
    guards: list[threading.Timer] = []

    class Guard(threading.Timer):
        def start(self) -> None:
            guards.append(self)
            super().start()

    module.threading.Timer = Guard  # type: ignore[misc]
    make, failed = module.Messenger, []

    def failing(comm: MPI.Intracomm) -> module.Messenger:
        if runtime.rank == 1 and not failed:
            failed.append(True)
            raise MPI.Exception(MPI.ERR_OTHER)
        return make(comm)

    module.Messenger = failing  # type: ignore[assignment, misc]
    runtime.regroup()
    assert guards
    assert all(guard.finished.is_set() for guard in guards)  # nothing ends this process later
    print("lives", flush=True)


def unanswered(runtime: Runtime) -> None:
    """A loss while a message waits for a rank that lives, but hears of the loss, and answers, later."""
    specs = {1: (TensorSpec.of(torch.zeros(1, 4)),)}
    if runtime.rank == 0:
        recorder = Recorder(runtime.clock, runtime.rank, runtime.rank, runtime.members)
        plane = DataPlane(runtime.circle.data, runtime.messenger, recorder, lambda message: True)
        sender = plane.outgoing(Channel(1, 0, 0, specs, 1, Coding(), 0))
        plane.incoming(Channel(1, 0, 1, specs, 1, Coding(), 0))
        sender.send(0, 0, 1, (torch.zeros(1, 4, requires_grad=True),))
        plane._look()
        runtime.circle.data.Revoke()
        with contextlib.suppress(MPI.Exception):
            while not plane._test():
                time.sleep(0.001)
    else:
        time.sleep(1.0)
    until = time.monotonic() + 2.0
    with contextlib.suppress(MPI.Exception):  # the other one regroups
        while time.monotonic() < until:
            runtime.messenger.poll()
            time.sleep(0.001)
    runtime.regroup()
    print("hears", flush=True)


def apart(runtime: Runtime) -> None:
    """One rank has come to the end when the other one, which alone knows of a loss, begins to regroup."""
    if runtime.rank == 0:
        time.sleep(0.5)
    else:
        assert not runtime.all_done()
    runtime.regroup()
    print("goes on", flush=True)


def looks(runtime: Runtime) -> None:
    """How often a data plane polls, how often it then goes through its channels, and how long it lets MPI be, in seconds,
    while its rank neither sends nor waits: while it shares the computing core, and nothing large is expected; something
    large; and on a core of its own."""
    specs = {1: (TensorSpec.of(torch.zeros(1, 4)),)}
    for shares_core, bulk in ((True, False), (True, True), (False, False)):
        recorder = Recorder(runtime.clock, runtime.rank, runtime.rank, runtime.members)
        plane = DataPlane(runtime.circle.data, runtime.messenger, recorder, lambda message: True, shares_core)
        plane.incoming(Channel(1 - runtime.rank, 0, 0, specs, 1, Coding(), 0)).took_bulk = bulk
        polled, looked, pauses, enough = [0], [0], [], threading.Event()
        move, look, interval = plane._move, plane._look, plane._interval

        def counted(
            changed: bool, polled: list[int] = polled, pauses: list[float] = pauses, move: Callable[[bool], bool] = move
        ) -> bool:
            polled[0] += len(pauses) < PAUSES
            return move(changed)

        def looking(looked: list[int] = looked, look: Callable[[], bool] = look) -> bool:
            looked[0] += 1
            return look()

        def noted(
            pauses: list[float] = pauses, enough: threading.Event = enough, interval: Callable[[], float] = interval
        ) -> float:
            pauses.append(interval())
            if len(pauses) == PAUSES:
                enough.set()
            return pauses[-1]

        plane._move, plane._look, plane._interval = counted, looking, noted  # type: ignore[method-assign]
        plane.start()
        assert enough.wait(LONG)
        print("looks", polled[0], looked[0], min(pauses[:PAUSES]), flush=True)
        plane.stop(LONG)
    assert runtime.all_done()


def links(runtime: Runtime) -> None:
    """The rates of pairs where every first exchange of a size is held up, and ranks 0 and 2 have half a link."""
    met: set[tuple[int | None, int]] = set()

    def exchange(_: MPI.Intracomm, peer: int | None, __: None, sizes: list[int], apart: bool) -> tuple[float, float, float]:
        late = 1.0 if (peer, sizes[1]) in met else 1.8
        met.add((peer, sizes[1]))
        half = 2.0 if {runtime.rank, peer} == {0, 2} else 1.0
        return late * half * sizes[1] / 1e6, 0.0, 0.0

    measure._exchange = exchange  # type: ignore[assignment]
    found = measure.pair_rates(runtime.world).rate
    print("links", *(round(rate / 1e6, 2) for rate in found), flush=True)


if __name__ == "__main__":
    this = Runtime.start()
    time.sleep(0.5)  # the other one is there, too, by then
    every = {one.__name__: one for one in (revoked, late, twice, unanswered, apart, looks, links)}
    every[sys.argv[1]](this)
    this.finish(0)
