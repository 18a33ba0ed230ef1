"""Calendar of the samples: which ones are in each micro-batch of each step, as a function of only seed and epoch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from accept_mpi.data.base import Indices
from accept_mpi.job import Job
from accept_mpi.seeds import ORDER, mix


class Position(NamedTuple):
    """Position in the training data after some steps."""

    step: int
    epoch: int
    seen: int
    """Samples of the epoch that have been used."""
    order: int | None = None
    """Seed of the order of the samples in this epoch; None: the run's."""


_BEGIN = Position(0, 0, 0)
_LONGEST = 1 << 16  # steps of a segment


@dataclass(frozen=True)
class Calendar:
    """The samples of each step of a run. Steps count from 0 over the whole run; a micro-batch holds ``micro`` samples, the
    last one of a batch perhaps fewer. A short batch at the end of an epoch has fewer micro-batches, not smaller ones, so
    that there are few shapes and BatchNorm sees its usual numbers of samples. In a run that resumes from a checkpoint, the
    calendar begins at ``since``."""

    samples: int
    batch_size: int
    micro_batches: int
    seed: int
    drop_last: bool = False
    since: Position = _BEGIN

    @property
    def micro(self) -> int:
        """Samples per micro-batch."""
        return -(-self.batch_size // self.micro_batches)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a full epoch."""
        if self.drop_last:
            return max(1, self.samples // self.batch_size)
        return -(-self.samples // self.batch_size)

    @property
    def _rest(self) -> int:
        """Steps left in the epoch in which the calendar begins."""
        if not self.since.seen:
            return self.steps_per_epoch
        left = self.samples - self.since.seen
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def position(self, step: int) -> Position:
        """Position after ``step`` steps of the run, which must not lie before ``since``."""
        since, made = self.since, step - self.since.step
        assert made >= 0, f"step {step} was before this calendar"
        if made < self._rest:
            return Position(step, since.epoch, since.seen + made * self.batch_size, since.order)
        epochs, steps = divmod(made - self._rest, self.steps_per_epoch)
        return Position(step, since.epoch + 1 + epochs, steps * self.batch_size)

    def epoch(self, step: int) -> int:
        """Index of the epoch that step ``step`` belongs to, both counted from 0."""
        return self.position(step).epoch

    def last_epoch(self, made: int) -> int:
        """Index of the epoch that the last of ``made`` steps of the run belonged to, also where the calendar begins after
        it."""
        if made > self.since.step:
            return self.epoch(made - 1)
        return self.since.epoch if self.since.seen else max(0, self.since.epoch - 1)

    def end(self, epochs: int, whole: bool = True) -> int:
        """Number of steps after which ``epochs`` epochs are over: at least ``since.step`` if ``whole``, else as if this
        calendar had always applied."""
        end = self.since.step + self._rest + (epochs - self.since.epoch - 1) * self.steps_per_epoch
        return max(end, self.since.step) if whole else end

    def sizes(self, step: int) -> list[int]:
        """Number of samples of each micro-batch of ``step``."""
        return micro_batch_sizes(min(self.batch_size, self.samples - self.position(step).seen), self.micro)

    def count(self, step: int) -> int:
        """Number of micro-batches of a step."""
        return len(self.sizes(step))

    def every_size(self) -> set[int]:
        """All numbers of samples that micro-batches will have, in full batches and at the ends of epochs."""
        later = self.since.step + self._rest
        steps = {self.since.step, max(self.since.step, later - 1), later, later + self.steps_per_epoch - 1}
        return {size for step in steps for size in self.sizes(step)}

    @property
    def most(self) -> int:
        """Number of micro-batches in a full batch."""
        return len(micro_batch_sizes(min(self.batch_size, self.samples), self.micro))

    def spanned(self, micro_batches: int) -> int:
        """Least number of steps in a row that always have this many micro-batches together: those that end an epoch may have
        fewer than others."""
        later = self.since.step + self._rest
        short = min(len(self.sizes(step)) for step in (max(self.since.step, later - 1), later + self.steps_per_epoch - 1))
        count = -(-micro_batches // self.most)
        while True:
            ends = -(-count // self.steps_per_epoch)  # also where the first epoch is a rest
            if (count - ends) * self.most + ends * short >= micro_batches:
                return count
            count += 1

    def indices(self, step: int) -> list[Indices]:
        """Indices of the samples of each micro-batch of ``step``."""
        _, epoch, begin, seed = self.position(step)
        order = _order(self.samples, self.seed if seed is None else seed, epoch)[begin : begin + self.batch_size]
        return np.split(order, np.cumsum(self.sizes(step))[:-1])


@lru_cache(maxsize=2)  # an asynchronous pipeline can be in two epochs at once
def _order(samples: int, seed: int, epoch: int) -> Indices:
    return np.random.Generator(np.random.Philox(mix(ORDER, seed, epoch))).permutation(samples)


def micro_batch_sizes(samples: int, micro: int) -> list[int]:
    """Sizes of the micro-batches of ``samples`` samples: all are ``micro`` except for a smaller last one."""
    return [micro] * (samples // micro) + ([samples % micro] if samples % micro else [])


def per_step(batch_size: int, micro_batches: int) -> int:
    """Number of micro-batches in a full batch: fewer than asked for if samples do not divide evenly (33 among 32: 17)."""
    return len(micro_batch_sizes(batch_size, -(-batch_size // micro_batches)))


def in_order(samples: int, micro: int) -> Iterator[Indices]:
    """Yield the sample indices of a test set's micro-batches, in its own order."""
    for begin in range(0, samples, micro):
        yield np.arange(begin, min(begin + micro, samples))


def segments(first: int, last: int, pauses: list[tuple[int, int]]) -> Iterator[range]:
    """Yield the steps from ``first`` up to, but without, ``last`` in ranges that end at every pause. ``pauses``: pairs
    (every, after) that pause every ``every`` steps, counted from ``after``; 0 means never."""
    begin = first
    while begin < last:
        end = min([last] + [after + ((begin - after) // every + 1) * every for every, after in pauses if every > 0])
        yield range(begin, end)
        begin = end


@dataclass(frozen=True)
class Milestones:
    """First and last step of a run, and the steps after which it pauses to evaluate or to keep a checkpoint."""

    first: int
    last: int
    evaluate_every: int
    checkpoint_every: int
    checkpoint_at_end: bool
    evaluate_from: int = 0
    """Step from which ``evaluate_every`` counts: a change of the batch size moves the ends of epochs."""
    checkpoint_evaluated: bool = False
    """True: with a checkpoint after every evaluation."""
    again: bool = False
    """True: the pause after ``first`` steps is made again, since a loss may have cut it short."""

    def evaluates(self, step: int) -> bool:
        """True if the run evaluates after ``step`` steps."""
        return self.evaluates_anyway(step) or (self.evaluate_every > 0 and step == self.last)

    def evaluates_anyway(self, step: int) -> bool:
        """True if the run evaluates after ``step`` steps even if it does not end there."""
        return self.evaluate_every > 0 and (step - self.evaluate_from) % self.evaluate_every == 0

    def checkpoints(self, step: int) -> bool:
        """True if the run keeps a checkpoint after ``step`` steps."""
        if step == self.last and self.checkpoint_at_end:
            return True
        if self.checkpoint_evaluated and self.evaluates(step):
            return True
        return self.checkpoint_every > 0 and step % self.checkpoint_every == 0

    def pauses(self, flows: bool) -> list[tuple[int, int]]:
        """Where a pipeline drains, as ``segments`` takes it: after every step, or if it ``flows`` where the run evaluates or
        keeps a checkpoint, and now and then in any case, since a segment's actions are reckoned with as a whole."""
        if not flows:
            return [(1, 0)]
        return [(self.evaluate_every, self.evaluate_from), (self.checkpoint_every, 0), (_LONGEST, 0)]

    @property
    def newest_checkpoint(self) -> int | None:
        """Number of steps after which the last checkpoint is kept; None if there is none."""
        pauses = (self.evaluate_every, self.evaluate_from), (self.checkpoint_every, 0)
        newest = [self.last - (self.last - after) % every for every, after in pauses if every > 0]
        return max((step for step in [self.last, *newest] if step > self.first and self.checkpoints(step)), default=None)


def micro_batches_of(job: Job) -> int:
    """Number of micro-batches in a full batch of a job, which must have been decided."""
    count = job.train.micro_batches
    if isinstance(count, str):
        raise ValueError("the number of micro-batches has not been decided")
    return per_step(job.train.batch_size, count)


def micro_batch_size(job: Job) -> int:
    """Samples of a job's micro-batches; a step's last one may have fewer."""
    return -(-job.train.batch_size // micro_batches_of(job))
