"""``train.micro_batches = "auto"``: into how many micro-batches a step is divided.

More of them fill a pipeline better, make finer shares for the members of a group and take less memory; each costs a message
per boundary and what a pass takes whatever its samples. Which weighs more depends on devices and links, so layers are timed
at a few sizes and the plans are compared. Weights depend on the number, if only in their last bits: it is found once, at the
beginning, and kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from accept_mpi.data.calendar import micro_batches_of, per_step
from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.planning.estimate import Estimate
from accept_mpi.planning.planner import plans_for
from accept_mpi.profiling.cluster_profile import ClusterProfile

_PER_RANK = {"1f1b-async": (2, 4), "1f1b-delayed": (3, 4)}
"""Micro-batches per rank that are tried. Where stages compute with older weights, fewer would make these older: updates that
one micro-batch misses are what is in flight, about two per rank, over those of a step."""
_PER_RANK_ELSE = (1, 2, 4, 8)
_ALIKE = 0.98
"""Plans whose steps are within 2 % are taken for equally fast, which is the precision of our measurements."""


def settled(job: Job, count: int) -> Job:
    """The job with this number of micro-batches."""
    return msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, micro_batches=count))


def of_size(job: Job, samples: int) -> Job:
    """The job with micro-batches of so many samples, unless it says how many there are."""
    return settled(job, -(-job.train.batch_size // samples)) if job.train.micro_batches == "auto" else job


def tried(job: Job, ranks: int) -> list[Job]:
    """The job itself, or the jobs to compare, with growing numbers of micro-batches."""
    if job.train.micro_batches != "auto":
        return [job]
    size = job.train.batch_size
    multiples = _PER_RANK.get(job.pipeline.schedule, _PER_RANK_ELSE)
    counts = sorted({per_step(size, min(size, ranks * multiple)) for multiple in multiples})
    return [settled(job, count) for count in counts]


class Found(NamedTuple):
    """The best plan for a job, and the cluster profile at its size of micro-batches."""

    job: Job
    cluster: ClusterProfile
    best: Estimate
    even: Estimate
    line: str
    """What was compared; empty if the job said the number."""


def best_of(surveys: Sequence[tuple[Job, ClusterProfile]]) -> Found:
    """The job, of those in ``tried``, that trains fastest. Among equally fast ones the one with most micro-batches where
    these keep weights newer, else that with fewest. Raises the first UserError if no plan fits any of them."""
    found: list[Found] = []
    mistakes: list[UserError] = []
    for job, cluster in surveys:
        try:
            found.append(Found(job, cluster, *plans_for(cluster, job), ""))
        except UserError as error:
            mistakes.append(error)
    if not found:
        raise mistakes[0]
    fastest = min(one.best.step for one in found)
    alike = [one for one in found if _ALIKE * one.best.step <= fastest]
    chosen = alike[-1 if found[0].job.pipeline.schedule in _PER_RANK else 0]
    if len(surveys) == 1:
        return chosen
    steps = ", ".join(f"{1e3 * one.best.step:.0f} ms with {micro_batches_of(one.job)}" for one in found)
    return chosen._replace(line=f"micro-batches: {micro_batches_of(chosen.job)} a step ({steps})")
