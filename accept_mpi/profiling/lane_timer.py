"""Measures what lanes gain on this device: micro-batches side by side, with fewer threads each, against one after another.

A pass with u threads takes about u^-g of its time on one. With g = 1 lanes gain nothing; k lanes of U / k threads each take
k^(g - 1) of the time per micro-batch, or less where caches hold less of each, or more where cores share their memory's
bandwidth. So it is measured, on a few pieces of the model, both ways in turn.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from accept_mpi.device.compute import here
from accept_mpi.device.cpu import set_own_threads
from accept_mpi.profiling.layer_timer import Subject, bytes_of, given_to, piece_of
from accept_mpi.profiling.layer_times import bit_reversed_order, pieces
from accept_mpi.profiling.timed_piece import TimedPiece

_PIECES = 3  # pieces of the model that are measured, spread over it
_TURNS = 2
_SHARE = 0.25  # of the job's ``probe_seconds``, for all of it
_LEAST = 0.05  # seconds of one measurement


def lane_counts(threads: int, micro_batches: int) -> list[int]:
    """The numbers of lanes that are tried on a rank with so many threads: two, and one for each thread."""
    return sorted(k for k in {2, threads} if 1 < k <= min(threads, micro_batches))


def are_known(gains: Mapping[int, float], micro_batches: int) -> bool:
    """True if ``gains`` of an earlier run have all numbers of lanes that would be tried here: that run may have had fewer
    micro-batches of the same size."""
    return set(lane_counts(torch.get_num_threads(), micro_batches)) <= gains.keys()


def time_lanes(subject: Subject, micro_batches: int, room: float = math.inf) -> dict[int, float]:
    """Seconds per micro-batch with each number of lanes (``lane_counts``), all of them together, as a multiple of those with
    one; empty if nothing could be measured. ``room``: bytes that a piece may take in all its lanes."""
    threads = torch.get_num_threads()
    counts = lane_counts(threads, micro_batches) if not here().alone else []
    if not counts:
        return {}
    every = pieces(subject.outline)
    chosen = [every[n] for n in bit_reversed_order(len(every))]
    fitting = [run for run in chosen if max(counts) * bytes_of(subject.outline, *run) <= room]
    fitting = [run for run in fitting if given_to(subject, *run) is not None]
    seconds = max(_LEAST, _SHARE * subject.job.pipeline.probe_seconds / (_PIECES * _TURNS * (1 + len(counts))))
    took = dict.fromkeys([1, *counts], 0.0)
    try:
        for start, stop in fitting[:_PIECES]:
            rounds = [_begun(subject, start, stop) for _ in range(max(counts))]
            for k in [1, *counts]:  # warms up
                _side_by_side(rounds[:k], threads // k, 0.0)
            for _ in range(_TURNS):
                for k in took:
                    took[k] += _side_by_side(rounds[:k], threads // k, seconds) / k
            for piece in rounds:
                piece.close()
    finally:
        torch.set_num_threads(threads)
    return {k: took[k] / took[1] for k in counts} if took[1] else {}


def _begun(subject: Subject, start: int, stop: int) -> TimedPiece:
    """A piece with micro-batches in flight."""
    piece, given = piece_of(subject, start, stop), given_to(subject, start, stop)
    assert given is not None
    piece.begin(*given)
    return piece


def _side_by_side(lanes: Sequence[TimedPiece], threads: int, seconds: float) -> float:
    """Seconds per round with all lanes computing for at least ``seconds``, each with so many threads."""
    ends: list[float] = [math.inf] * len(lanes)
    counts = [0] * len(lanes)
    together = threading.Barrier(len(lanes))
    errors: list[BaseException] = []

    def compute(lane: int, once: Callable[[], object]) -> None:
        try:
            set_own_threads(threads)
            together.wait()
            began = time.monotonic()
            while not counts[lane] or time.monotonic() - began < seconds:
                once()
                counts[lane] += 1
            ends[lane] = time.monotonic() - began
        except BaseException as error:
            errors.append(error)
            together.abort()

    running = [threading.Thread(target=compute, args=(n, piece.round)) for n, piece in enumerate(lanes)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]
    return max(end / count for end, count in zip(ends, counts, strict=True))
