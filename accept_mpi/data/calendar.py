"""Which samples are in which micro-batch of which step: a function of seed and epoch only."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from accept_mpi.data.base import Indices
from accept_mpi.job import Job
from accept_mpi.seeds import ORDER, mix


class Position(NamedTuple):
    """Where the data are after some steps."""

    step: int
    epoch: int
    seen: int
    """Samples of the epoch."""
    order: int | None = None
    """Seed of the order of what is left of the epoch; None: the run's."""


_BEGIN = Position(0, 0, 0)


@dataclass(frozen=True)
class Calendar:
    """The calendar of a run. Steps count from 0 over the whole run; a micro-batch holds ``micro`` samples, the last of a
    batch perhaps fewer. A short batch at the end of an epoch has fewer micro-batches, not smaller ones, so that shapes
    stay few and BatchNorm sees what it always sees. A run that goes on from a checkpoint has a calendar ``since`` then."""

    samples: int
    batch_size: int
    micro_batches: int
    seed: int
    drop_last: bool = False
    since: Position = _BEGIN

    @property
    def micro(self) -> int:
        """Samples a micro-batch."""
        return -(-self.batch_size // self.micro_batches)

    @property
    def steps_per_epoch(self) -> int:
        if self.drop_last:
            return max(1, self.samples // self.batch_size)
        return -(-self.samples // self.batch_size)

    @property
    def _rest(self) -> int:
        """Steps of the epoch with which the calendar begins."""
        if not self.since.seen:
            return self.steps_per_epoch
        left = self.samples - self.since.seen
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def position(self, step: int) -> Position:
        """After ``step`` steps, from ``since`` on."""
        since, made = self.since, step - self.since.step
        assert made >= 0, f"step {step} was before this calendar"
        if made < self._rest:
            return Position(step, since.epoch, since.seen + made * self.batch_size, since.order)
        epochs, steps = divmod(made - self._rest, self.steps_per_epoch)
        return Position(step, since.epoch + 1 + epochs, steps * self.batch_size)

    def epoch(self, step: int) -> int:
        return self.position(step).epoch

    def end(self, epochs: int, whole: bool = True) -> int:
        """After how many steps so many epochs are over: at the earliest now where ``whole``, else as if the calendar had
        always been this."""
        end = self.since.step + self._rest + (epochs - self.since.epoch - 1) * self.steps_per_epoch
        return max(end, self.since.step) if whole else end

    def sizes(self, step: int) -> list[int]:
        """Samples of each micro-batch of ``step``."""
        return micro_batch_sizes(min(self.batch_size, self.samples - self.position(step).seen), self.micro)

    def every_size(self) -> set[int]:
        """Of all micro-batches that there will be: of whole batches and of those at an epoch's end."""
        later = self.since.step + self._rest
        steps = {self.since.step, max(self.since.step, later - 1), later, later + self.steps_per_epoch - 1}
        return {size for step in steps for size in self.sizes(step)}

    @property
    def most(self) -> int:
        """Micro-batches of a whole batch."""
        return len(micro_batch_sizes(min(self.batch_size, self.samples), self.micro))

    def indices(self, step: int) -> list[Indices]:
        """Sample numbers of each micro-batch of ``step``."""
        _, epoch, begin, seed = self.position(step)
        order = _order(self.samples, self.seed if seed is None else seed, epoch)[begin : begin + self.batch_size]
        return np.split(order, np.cumsum(self.sizes(step))[:-1])


@lru_cache(maxsize=2)  # an asynchronous pipeline is in two epochs at once
def _order(samples: int, seed: int, epoch: int) -> Indices:
    return np.random.Generator(np.random.Philox(mix(ORDER, seed, epoch))).permutation(samples)


def micro_batch_sizes(samples: int, micro: int) -> list[int]:
    """Sizes of the micro-batches of ``samples`` samples: all ``micro``, but for a last, smaller one."""
    return [micro] * (samples // micro) + ([samples % micro] if samples % micro else [])


def per_step(batch_size: int, micro_batches: int) -> int:
    """Micro-batches of a whole batch: fewer than asked for where samples do not share out evenly (33 among 32: 17)."""
    return len(micro_batch_sizes(batch_size, -(-batch_size // micro_batches)))


def in_order(samples: int, micro: int) -> Iterator[Indices]:
    """Micro-batches of a test set, in its own order."""
    for begin in range(0, samples, micro):
        yield np.arange(begin, min(begin + micro, samples))


def segments(first: int, last: int, pauses: list[tuple[int, int]]) -> Iterator[range]:
    """Steps ``first`` to ``last`` (excluded) in runs that end wherever one of ``pauses``, (every, after), has it: ``every``
    steps from ``after`` on."""
    begin = first
    while begin < last:
        end = min([last] + [after + ((begin - after) // every + 1) * every for every, after in pauses if every > 0])
        yield range(begin, end)
        begin = end


@dataclass(frozen=True)
class Milestones:
    """The steps that a run makes, and after which it pauses to evaluate or to keep a checkpoint."""

    first: int
    last: int
    evaluate_every: int
    checkpoint_every: int
    checkpoint_at_end: bool
    evaluate_from: int = 0
    """A step from which ``evaluate_every`` counts: an epoch may end elsewhere since the batch size has changed."""

    def evaluates(self, step: int) -> bool:
        return self.evaluate_every > 0 and ((step - self.evaluate_from) % self.evaluate_every == 0 or step == self.last)

    def checkpoints(self, step: int) -> bool:
        if step == self.last and self.checkpoint_at_end:
            return True
        return self.checkpoint_every > 0 and step % self.checkpoint_every == 0

    @property
    def newest_checkpoint(self) -> int | None:
        """The last step after which one is kept."""
        return next((step for step in range(self.last, self.first, -1) if self.checkpoints(step)), None)


def micro_batches_of(job: Job) -> int:
    """Of a whole batch."""
    return per_step(job.train.batch_size, job.train.micro_batches)
