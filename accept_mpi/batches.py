"""Which samples are in which micro-batch of which step: a function of seed and epoch only."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from accept_mpi.data.base import Indices
from accept_mpi.seeds import ORDER, mix


@dataclass(frozen=True)
class Batches:
    """The calendar of a run. Steps count from 0 over the whole run; a micro-batch holds ``micro`` samples, the last of a
    batch perhaps fewer. A short batch at the end of an epoch has fewer micro-batches, not smaller ones, so that shapes
    stay few and BatchNorm sees what it always sees."""

    samples: int
    batch_size: int
    micro_batches: int
    seed: int
    drop_last: bool = False

    @property
    def micro(self) -> int:
        """Samples a micro-batch."""
        return -(-self.batch_size // self.micro_batches)

    @property
    def steps_per_epoch(self) -> int:
        if self.drop_last:
            return max(1, self.samples // self.batch_size)
        return -(-self.samples // self.batch_size)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def sizes(self, step: int) -> list[int]:
        """Samples of each micro-batch of ``step``."""
        begin = step % self.steps_per_epoch * self.batch_size
        return cut(min(self.batch_size, self.samples - begin), self.micro)

    def indices(self, step: int) -> list[Indices]:
        """Sample numbers of each micro-batch of ``step``."""
        begin = step % self.steps_per_epoch * self.batch_size
        order = _order(self.samples, self.seed, self.epoch(step))[begin : begin + self.batch_size]
        return np.split(order, np.cumsum(self.sizes(step))[:-1])


@lru_cache(maxsize=2)  # an asynchronous pipeline is in two epochs at once
def _order(samples: int, seed: int, epoch: int) -> Indices:
    return np.random.Generator(np.random.Philox(mix(ORDER, seed, epoch))).permutation(samples)


def cut(samples: int, micro: int) -> list[int]:
    """Sizes of the micro-batches of ``samples`` samples: all ``micro``, but for a last, smaller one."""
    return [micro] * (samples // micro) + ([samples % micro] if samples % micro else [])


def per_step(batch_size: int, micro_batches: int) -> int:
    """Micro-batches of a whole batch: fewer than asked for where samples do not share out evenly (33 among 32: 17)."""
    return len(cut(batch_size, -(-batch_size // micro_batches)))


def in_order(samples: int, micro: int) -> Iterator[Indices]:
    """Micro-batches of a test set, in its own order."""
    for begin in range(0, samples, micro):
        yield np.arange(begin, min(begin + micro, samples))


def segments(first: int, last: int, pauses: list[int]) -> Iterator[range]:
    """Steps ``first`` to ``last`` (excluded) in runs that end wherever one of ``pauses`` divides the steps made."""
    begin = first
    while begin < last:
        end = min([last] + [(begin // every + 1) * every for every in pauses if every > 0])
        yield range(begin, end)
        begin = end
