"""Measures clocks, latency and bandwidth between pairs of ranks. All ranks call these functions together."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from accept_mpi.codecs.message import Bytes
from accept_mpi.errors import DeadlineError
from accept_mpi.polling import SENDING_SECONDS

_PINGS = 20
_SECONDS = 120.0  # deadline of one exchange
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 24
_ENOUGH_SECONDS = 0.05  # a message that takes this long measures bandwidth well
_BUSY_SECONDS = 0.25  # of traffic: much longer than the burst that a link passes at full speed before it slows down
_AIM = 1.25  # times as long as it must be at least: what it takes is foreseen from a shorter one
_REPEATS = 3  # times at most that a pair's exchange is measured: a CPU quota may stop either rank for half of one
_USUAL = 0.9  # a rate of at least this share of the best that either rank has seen is accepted without a repetition


def clock_offset(world: MPI.Intracomm, others: Iterable[int]) -> float:
    """Rank 0's ``time.monotonic()`` minus this rank's, in seconds, from the exchange with the shortest round trip of several
    (Cristian 1989); 0 on a rank that is not among the ``others``, which are measured."""
    comm, offset = _own(world), 0.0
    mine, theirs = np.zeros(1), np.zeros(1)
    for rank in others:
        best = float("inf")
        for _ in range(_PINGS):
            if comm.rank == 0:
                _wait(comm.Irecv(theirs, rank), rank)
                mine[0] = time.monotonic()
                _wait(comm.Isend(mine, rank), rank)
            elif comm.rank == rank:
                answer = comm.Irecv(theirs, 0)
                sent = time.monotonic()
                _wait(comm.Isend(mine, 0), 0)
                _wait(answer, 0)
                trip = time.monotonic() - sent
                if trip < best:
                    best, offset = trip, theirs[0] - (sent + trip / 2)
    comm.Free()
    return float(offset)


def links(world: MPI.Intracomm) -> dict[tuple[int, int], tuple[float, float]]:
    """Latency in seconds (half the median round trip of 8 bytes) and bandwidth in bytes/s, by pair (a, b) with a < b.

    A rank gets the pairs that it belongs to. One pair measures at a time.
    """
    comm = _own(world)
    found = {}
    for a in range(comm.size):
        for b in range(a + 1, comm.size):
            if comm.rank in (a, b):
                found[a, b] = _pair(comm, b if comm.rank == a else a, comm.rank == a)
            _wait(comm.Ibarrier(), a)
    comm.Free()
    return found


def _own(world: MPI.Intracomm) -> MPI.Intracomm:
    """A duplicate of ``world``, so that measurements cannot receive other messages."""
    comm, request = world.Idup()
    _wait(request, world.rank)
    return comm


class NeighbourRates(NamedTuple):
    """Rates of a rank's links while all links are busy in both directions, and the CPU time of the traffic."""

    before: float
    """Bytes/s from the stage before; 0.0 if nothing comes from it."""
    after: float
    """Bytes/s from the stage after; 0.0 if nothing comes from it."""
    seconds_per_byte: float
    """CPU seconds to send or receive a byte."""
    seconds_per_message: float
    """CPU seconds to send or receive a message, without its bytes."""


def neighbour_rates(
    world: MPI.Intracomm, before: int | None, after: int | None, weights: tuple[int, int, int, int]
) -> NeighbourRates:
    """Measure the rates from ranks ``before`` and ``after`` (None at the ends of the pipeline), on all links simultaneously.

    ``weights``: bytes that training sends to ``after`` and to ``before`` and receives from ``before`` and from ``after``.
    The bytes sent here are in proportion to them, so that traffic shares a host's link as it will in training.
    """
    comm = _own(world)
    most = np.zeros(1)
    _wait(comm.Iallreduce(np.array([float(max(weights))]), most, MPI.MAX), comm.rank)
    nbytes = _FIRST_BYTES
    used: list[tuple[int, float]] = []  # total bytes and CPU seconds of each exchange
    while True:
        sizes = [max(1, int(nbytes * weight / max(most[0], 1.0))) if weight else 0 for weight in weights]
        *seconds, cpu = _exchange(comm, before, after, sizes)
        used.append((sum(sizes), cpu))
        slowest = np.zeros(1)
        _wait(comm.Iallreduce(np.array([max(seconds)]), slowest, MPI.MAX), comm.rank)
        if slowest[0] > _BUSY_SECONDS or nbytes >= _MOST_BYTES:
            break
        nbytes = _more(nbytes, slowest[0], _BUSY_SECONDS)
    comm.Free()
    from_before, from_after = (n / max(t, 1e-9) if n else 0.0 for n, t in zip(sizes[2:], seconds, strict=True))
    per_byte, per_exchange = _line(used)
    return NeighbourRates(from_before, from_after, per_byte, per_exchange / max(1, sum(map(bool, sizes))))


class PairRates(NamedTuple):
    """Rates of a rank's links to all other ranks, measured with both directions busy and one link per rank at a time."""

    rate: list[float]
    """Bytes/s from each rank; infinite from itself."""
    latency: list[float]
    """Seconds that a short message takes from each rank."""
    seconds_per_byte: float
    """CPU seconds to send or receive a byte."""
    seconds_per_message: float
    """CPU seconds to send or receive a message, without its bytes."""


def pair_rates(world: MPI.Intracomm) -> PairRates:
    """Measure the rates of all pairs in a round-robin tournament: every rank meets another one per round, so that N - 1
    rounds suffice (N if the number of ranks is odd)."""
    comm = _own(world)
    count = comm.size + comm.size % 2
    rate, latency = [math.inf] * comm.size, [0.0] * comm.size
    used: list[tuple[int, float]] = []  # bytes per direction and CPU seconds of each exchange
    fastest = 0.0  # highest rate so far, from any rank
    for turn in range(count - 1):
        peer = _opponent(comm.rank, turn, count)
        _wait(comm.Ibarrier(), comm.rank)
        if peer >= comm.size:
            continue
        leads = comm.rank < peer
        latency[peer] = float(np.median([_round_trip(comm, peer, leads, np.zeros(8, np.uint8)) for _ in range(_PINGS)])) / 2
        nbytes, took, repeats = _FIRST_BYTES, math.inf, 0
        while repeats < _REPEATS:
            seconds, _, cpu = _exchange(comm, peer, None, [0, nbytes, nbytes, 0], apart=True)
            used.append((nbytes, cpu))
            took = min(took, max(seconds, 1e-9))
            theirs, theirs_fastest = _swap(comm, peer, [took, fastest])
            slower, seen = max(took, theirs), max(fastest, theirs_fastest)
            if slower <= _BUSY_SECONDS / 2 and nbytes < _MOST_BYTES:
                nbytes, took, repeats = _more(nbytes, slower, _BUSY_SECONDS / 2), math.inf, 0
            elif nbytes / slower >= _USUAL * seen > 0:
                break
            else:
                repeats += 1
        rate[peer] = nbytes / took
        fastest = max(fastest, rate[peer])
    _wait(comm.Ibarrier(), comm.rank)
    comm.Free()
    byte, message = _line(used)
    return PairRates(rate, latency, byte / 2, message / 2)


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """CPU seconds per byte and per exchange, by a line through the (bytes, CPU seconds) of the smallest and the large
    exchanges."""
    if not points:
        return 0.0, 0.0
    smallest, largest = min(points)[0], max(points)[0]
    if not largest:
        return 0.0, 0.0
    small = float(np.median([cpu for size, cpu in points if size == smallest]))
    if largest == smallest:
        return small / smallest, 0.0
    slopes = [(cpu - small) / (size - smallest) for size, cpu in points if size > max(smallest, largest / 2)]
    byte = max(0.0, float(np.median(slopes)))
    return byte, max(0.0, small - byte * smallest)


def _more(nbytes: int, seconds: float, least: float) -> int:
    """Bytes of the next exchange, after one of ``nbytes`` that took ``seconds`` and should have taken ``least``: four times
    as many at most, since what a short one takes says little about a long one."""
    return min(4 * nbytes, int(_AIM * nbytes * least / max(seconds, 1e-9)) + 1, _MOST_BYTES)


def _opponent(rank: int, turn: int, count: int) -> int:
    """Opponent of ``rank`` in round ``turn`` of a tournament by the circle method: ``count`` (even) ranks meet in all pairs
    in ``count`` - 1 rounds."""
    last = count - 1
    if rank == last:
        return turn * (count // 2) % last
    other = (turn - rank) % last
    return last if other == rank else other


def _exchange(
    comm: MPI.Intracomm, before: int | None, after: int | None, sizes: list[int], apart: bool = False
) -> tuple[float, float, float]:
    """Send to both neighbours and receive from them simultaneously.

    ``sizes``: bytes to ``after``, to ``before``, from ``before``, from ``after``. Returns the seconds until the data from
    ``before`` and from ``after`` arrived, and CPU seconds. ``apart``: do not wait for all other ranks at the start.
    """
    buffers = [np.full(size, 1, np.uint8) for size in sizes]  # zeros may all lie in one page, and so in the cache
    ways: list[tuple[int | None, Any]] = [
        (after, comm.Issend),
        (before, comm.Issend),
        (before, comm.Irecv),
        (after, comm.Irecv),
    ]
    if not apart:
        _wait(comm.Ibarrier(), comm.rank)
    began, cpu = time.monotonic(), time.thread_time()
    open_ = {
        i: way(buffer, peer)
        for i, ((peer, way), buffer) in enumerate(zip(ways, buffers, strict=True))
        if peer is not None and buffer.size
    }
    took = [0.0] * 4
    while open_:
        for i in [i for i, request in open_.items() if request.Test()]:
            del open_[i]
            took[i] = time.monotonic() - began
        if time.monotonic() - began > _SECONDS:
            raise DeadlineError(f"waited {_SECONDS:.0f} s for ranks {before} and {after} while measuring links")
        time.sleep(SENDING_SECONDS)  # like the data plane, whose rate is wanted
    return took[2], took[3], time.thread_time() - cpu


def _pair(comm: MPI.Intracomm, peer: int, leads: bool) -> tuple[float, float]:
    latency = float(np.median([_round_trip(comm, peer, leads, np.zeros(8, np.uint8)) for _ in range(_PINGS)])) / 2
    nbytes = _FIRST_BYTES
    while True:
        seconds = min(_round_trip(comm, peer, leads, np.zeros(nbytes, np.uint8)) for _ in range(3)) / 2
        enough = np.array([seconds > _ENOUGH_SECONDS or nbytes >= _MOST_BYTES])
        _to_follower(comm, peer, leads, enough)  # the leader decides for both
        if enough[0]:
            return latency, nbytes / max(seconds - latency, 1e-9)
        nbytes *= 4


def _round_trip(comm: MPI.Intracomm, peer: int, leads: bool, data: Bytes) -> float:
    back = np.empty_like(data)
    incoming = comm.Irecv(back, peer)
    began = time.monotonic()
    if leads:
        _wait(comm.Isend(data, peer), peer)
        _wait(incoming, peer)
    else:
        _wait(incoming, peer)
        _wait(comm.Isend(data, peer), peer)
    return time.monotonic() - began


def _to_follower(comm: MPI.Intracomm, peer: int, leads: bool, value: np.ndarray) -> None:
    _wait(comm.Isend(value, peer) if leads else comm.Irecv(value, peer), peer)


def _swap(comm: MPI.Intracomm, peer: int, values: list[float]) -> list[float]:
    """Exchange values with the peer; returns the peer's."""
    theirs = np.empty(len(values))
    incoming, outgoing = comm.Irecv(theirs, peer), comm.Isend(np.array(values), peer)
    _wait(outgoing, peer)
    _wait(incoming, peer)
    return theirs.tolist()


def _wait(request: MPI.Request, peer: int, pause: Callable[[float], None] = time.sleep) -> None:
    """Wait for a request: spin briefly, then sleep between polls, so that ranks that share a core let each other work.
    Raises DeadlineError."""
    began = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - began
        if waited > _SECONDS:
            raise DeadlineError(f"waited {_SECONDS:.0f} s for rank {peer} while measuring")
        if waited > 0.001:
            pause(0.0001)
