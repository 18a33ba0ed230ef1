"""The data set, on the ranks that can load it."""

import contextlib
import itertools
import logging
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from accept_mpi.comm.runtime import Runtime
from accept_mpi.data import ZOO, Dataset, classes_of, fetch, gives_targets
from accept_mpi.data import of_job as data_of
from accept_mpi.data.base import begin_epoch
from accept_mpi.data.checksums import Checksum, checksum
from accept_mpi.errors import Agreed, UserError
from accept_mpi.job import Job
from accept_mpi.seeds import state

log = logging.getLogger(__name__)

Data = tuple[Dataset | None, Dataset | None]
"""Training and test set; (None, None) where they are not."""


class Sizes(NamedTuple):
    """What all ranks know of the data."""

    samples: int
    tests: int
    classes: tuple[str, ...]
    """Names of the training set's classes; empty if it has none."""


Known = dict[tuple[str, int], tuple[str, Checksum]]
"""Checksums of what the first stage takes, by data set and sample, with who had it."""

_LOOKED_AT = 64
"""Most samples of a data set whose targets are compared before training."""
_APART = 8  # of the samples that are looked at, one in so many is one whose inputs are compared, too
_ASKED_TWICE = 2  # samples of the training set: one may take long


def load_here(runtime: Runtime, job: Job, have: Data = (None, None)) -> tuple[Data, int]:
    """Load the data if this rank can and does not ``have`` them. Returns them and the first rank that has them. All ranks
    call this together. Raises Agreed if none has."""
    data, error = have, None
    errors: list[str | None] = []
    for mine in turns(runtime, job, data[0] is None):
        if mine:
            try:
                data = data_of(job)
            except UserError as mistake:
                error = str(mistake)
        errors = runtime.messenger.allgather(error, runtime.startup_seconds, "the data")
    if None not in errors:
        raise Agreed(str(errors[0]))
    return data, errors.index(None)


def turns(runtime: Runtime, job: Job, loads: bool) -> list[bool]:
    """Whether this rank, which ``loads`` data or does not, does so in the first turn, in the second one. All ranks call this
    together, and end a turn together.

    A data set's function may download files or make a cache, and take what is there for whole. So of the ranks of one host
    one is first.
    """
    if job.data.name in ZOO:  # these write nothing
        return [loads]
    told = runtime.messenger.allgather(loads, runtime.startup_seconds, "who loads the data")
    hosts = [facts["machine_id"] if one else None for facts, one in zip(runtime.hosts, told, strict=True)]
    is_first = [one and hosts.index(host) == rank for rank, (one, host) in enumerate(zip(told, hosts, strict=True))]
    if is_first == told:
        return [loads]
    return [is_first[runtime.rank], loads and not is_first[runtime.rank]]


def agree_on_data(
    runtime: Runtime, data: Data, evaluates: bool, inputs_on: Sequence[int] = (), known: Known | None = None
) -> Sizes:
    """The sizes of the data, from the ranks that have them; all call this together. ``evaluates``: the test set will be
    used; ``inputs_on``: the ranks of the first stage; ``known``: what ranks had that held it, to which theirs is added.
    Raises Agreed if the first and the last stage have different data, or if ranks that hold or held the first do."""
    train, test = data
    mine = None
    if train is not None and test is not None:
        mine = len(train), len(test), _changing(cast(Hashable, train)), classes_of(train)
    told = runtime.messenger.allgather(mine, runtime.startup_seconds, "the sizes of the data")
    sizes = {rank: (found[0], found[1]) for rank, found in enumerate(told) if found}
    if runtime.rank == 0:
        _warn(*next((found[2] for found in told if found and found[2] is not None), ()))
    first = min(sizes)
    for rank, (samples, tests) in sizes.items():
        if sizes[rank] != sizes[first]:
            raise Agreed(
                f"data.name: the first and the last stage's hosts have different data: {sizes[first][0]} training and "
                f"{sizes[first][1]} test samples on rank {first}, {samples} and {tests} on rank {rank}; give both the same "
                "files"
            )
    used = {"training": train, **({"test": test} if evaluates else {})}
    if len(sizes) > 1:
        _agree_on_targets(runtime, used)
    if all(found[2] is None for found in told if found):
        _agree_on_inputs(runtime, used, inputs_on, {} if known is None else known)
    return Sizes(*sizes[first], tuple(told[first][3]))


def _agree_on_targets(runtime: Runtime, data: dict[str, Dataset | None]) -> None:
    """Compare some targets of each data set, on the ranks that have it, one sample at a time. Raises Agreed if they
    differ."""

    def sums() -> dict[str, dict[int, Checksum]]:
        return {which: _sums(cast(Hashable, one), which) for which, one in data.items() if one}

    mine = runtime.agree("the data's targets", sums)
    told = runtime.messenger.allgather(mine, runtime.startup_seconds, "checksums of the data")
    found = {rank: one for rank, one in enumerate(told) if one}
    first = min(found)
    for rank, which in itertools.product(found, data):
        for n, one in found[first][which].items():
            if not Checksum(*one).matches(Checksum(*found[rank][which][n])):
                raise Agreed(
                    f"data.name: the first and the last stage's hosts have different data: sample {n} of the {which} set "
                    f"has another target on rank {first} than on rank {rank}; give both the same files, in the same order, "
                    "and let the data set draw with torch's, NumPy's or Python's global random numbers, which are seeded "
                    "for each sample"
                )


def _agree_on_inputs(runtime: Runtime, data: dict[str, Dataset | None], first: Sequence[int], known: Known) -> None:
    """Compare a few samples on the ranks that take inputs, where targets are known to be alike. Raises Agreed if they
    differ."""

    def sums() -> dict[str, dict[int, Checksum]]:
        mine = data.items() if runtime.rank in first else ()
        return {which: _input_sums(cast(Hashable, one), which) for which, one in mine if one}

    told = runtime.messenger.allgather(
        runtime.agree("the data's inputs", sums), runtime.startup_seconds, "checksums of the inputs"
    )
    for rank, which in itertools.product(first, data):
        who = runtime.at(rank)
        for n, one in told[rank].get(which, {}).items():
            other, before = known.setdefault((which, n), (who, Checksum(*one)))
            if not before.matches(Checksum(*one)):
                raise Agreed(
                    f"data.name: hosts that hold the first stage have different data: sample {n} of the {which} set has "
                    f"other inputs on {who} than on {other}; give both the same files, in the same order, and the same "
                    "versions of what reads them"
                )


@lru_cache(maxsize=2)  # each deployment asks anew, and a sample may take long
def _sums(data: Any, which: str) -> dict[int, Checksum]:
    _at_first(data, which)
    return {n: checksum(_target(data, n, which)) for n in _some(data)}


@lru_cache(maxsize=2)
def _input_sums(data: Any, which: str) -> dict[int, Checksum]:
    _at_first(data, which)
    seed, targets = 0 if which == "training" else None, gives_targets(data)
    found = {n: fetch(data, np.array([n]), seed, inputs=True, targets=targets) for n in _some(data)[::_APART]}
    return {n: checksum([one.inputs, one.targets] if targets else one.inputs) for n, one in found.items()}


_ANOTHER = "is another one whenever it is asked for: the data set draws random numbers of its own"
_ONCE = "is drawn at random when it is first asked for, and kept: each rank keeps what it has asked for first"


@lru_cache(maxsize=2)
def _changing(data: Any) -> tuple[int, str] | None:
    """Number of a training sample that is another one when it is asked for again, or that is drawn at random only once, and
    which of these it is; None if there is none."""
    with contextlib.suppress(Exception):  # which is told where training asks for it
        _at_first(data, "training")
        asked = _some(data)[:_ASKED_TWICE]
        for n in asked:
            (once, drawn), (again, drawn_again) = (
                (fetch(data, np.array([n]), 0, inputs=True, targets=True), state()) for _ in range(2)
            )
            if any(checksum(a) != checksum(b) for a, b in zip(once, again, strict=True)):
                return n, _ANOTHER
            if drawn != drawn_again and n == asked[-1]:  # the first one may have made something ready
                return n, _ONCE
    return None


@lru_cache
def _warn(*found: int | str) -> None:
    """Say once on rank 0 that results depend on who asks for samples, and how often. ``found``: as of ``_changing``."""
    if found:
        log.warning(
            "data.name: training sample %d %s, so results depend on the ranks and differ from one process's; torch's, "
            "NumPy's and Python's global random numbers are seeded for each sample",
            *found,
        )


def _some(data: Dataset) -> list[int]:
    """Samples from everywhere in a data set, which is often sorted."""
    return sorted({round(place) for place in np.linspace(0, len(data) - 1, _LOOKED_AT)})


def _at_first(data: Dataset, which: str) -> None:
    """Have a training set give the samples of its first epoch: this rank may have trained with later ones."""
    if which == "training":
        begin_epoch(data, 0, 0)


def _target(data: Dataset, index: int, which: str) -> Any:
    return fetch(data, np.array([index]), 0 if which == "training" else None, inputs=False, targets=True).targets
