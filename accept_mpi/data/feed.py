"""A stage's part of the data, step by step: inputs on the first stage, targets on the last, both on a lone rank.

The last stage has all targets of a step before its first forward, since they determine how much each micro-batch counts.

Where the first stage can ask for targets, too (``gives_targets``), it does, and both ends compare checksums of what they
got: a data set with its own generator, or another order of files on another host, would pair inputs with other targets, and
nobody would notice.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from accept_mpi.data import Dataset, Samples, fetch, gives_targets
from accept_mpi.data.base import Indices, begin_epoch
from accept_mpi.data.calendar import Calendar
from accept_mpi.data.checksums import Checksum, checksum, same
from accept_mpi.errors import DeadlineError, UserError
from accept_mpi.plan import Place
from accept_mpi.seeds import AUGMENT, mix

_POLL = 0.002

Sums = dict[int, Checksum]
"""Checksums of the targets of a step, or of the test set, by micro-batch."""


class Drawn:
    """Compares the targets that first and last stage have got for the same samples. The first stage uses ``tell``, the last
    one everything else. Steps count from 0; ``~step`` is the evaluation after that many steps. Thread-safe."""

    def __init__(self, tell: Callable[[int, Sums], None]) -> None:
        """``tell`` sends a step's checksums to the last stage, where ``hear`` takes them."""
        self.tell = tell
        self._lock = threading.Lock()
        self._mine: dict[int, Sums] = {}
        self._others: dict[int, Sums] = {}

    def hear(self, step: int, sums: Sums) -> None:
        """Take checksums of a step from a rank of the first stage."""
        with self._lock:
            self._others.setdefault(step, {}).update(sums)

    def expect(self, step: int, sums: Sums) -> None:
        """Take the checksums of a step from the last stage: of all micro-batches; of an evaluation, of this rank's."""
        with self._lock:
            self._mine[step] = sums

    def check(self) -> None:
        """Compare the steps that both stages have reported. Raises UserError if they differ."""
        with self._lock:
            both = self._mine.keys() & self._others.keys()
            for step in sorted(step for step in both if self._mine[step].keys() <= self._others[step].keys()):
                if not same(self._mine.pop(step), self._others.pop(step)):
                    where = f"step {step + 1}" if step >= 0 else f"the evaluation after step {~step}"
                    raise UserError(
                        f"data.name: first and last stage have different targets for the same samples in {where}: the data "
                        "set has random numbers of its own (use torch's, NumPy's or Python's global ones, which are seeded "
                        "for each sample), or the hosts have other files"
                    )
                for late in [one for one in self._others.keys() - self._mine.keys() if step <= one < 0]:
                    del self._others[late]  # of other members' test samples

    def check_all(self, deadline: float, check: Callable[[], None]) -> None:
        """Compare all steps, waiting up to ``deadline`` seconds for the first stage. Raises UserError and DeadlineError, and
        what ``check`` raises."""
        until = time.monotonic() + deadline
        self.check()
        while self._mine:
            if time.monotonic() > until:
                raise DeadlineError(f"waited {deadline:.0f} s for what the first stage drew")
            time.sleep(_POLL)
            check()
            self.check()


class Feed:
    """The data of one rank's stage."""

    def __init__(
        self,
        batches: Calendar,
        data: tuple[Dataset | None, Dataset | None],
        place: Place,
        shares: Callable[[Sequence[Any], Sequence[int]], list[float]] | None,
        drawn: Drawn,
        table: Sequence[int] = (),
    ) -> None:
        """``shares``: the loss's (``Loss.shares``) on the last stage, else None. ``data``: training and test set,
        needed on the first and the last stage. ``table``: the member of the group that takes each micro-batch; empty: this
        rank takes all."""
        self._batches, self._place, self._shares, self._drawn = batches, place, shares, drawn
        self._data, self._test = data
        self._table = table
        either = place.first != place.last and (place.leads or place.first)
        self._compares, self._compares_tests = (either and gives_targets(one) for one in data)
        self._epoch = -1
        """The epoch that the training set was last told."""
        self._tested: Sums = {}
        self._steps: dict[int, list[Samples]] = {}
        self._weighed: dict[int, list[float]] = {}
        self._sums: dict[int, Sums] = {}

    def _is_mine(self, k: int) -> bool:
        return not self._table or self._table[k] == self._place.member

    def micro_batch(
        self, step: int, k: int, indices: Sequence[Indices], drawing: Callable[[], AbstractContextManager[None]]
    ) -> tuple[Samples, float]:
        """What ``take`` and ``share`` give of micro-batch ``k``. ``indices``: the samples of each micro-batch of the step;
        ``drawing``: makes a context in which nothing else draws random numbers, as a data set may."""
        with drawing():
            self.begin(step, indices)
            return self.take(step, k, indices[k]), self.share(step, k)

    def begin(self, step: int, indices: Sequence[Indices]) -> None:
        """Prepare a step, before any micro-batch of it; again does nothing. ``indices``: the samples of each micro-batch."""
        if self._shares is None or step in self._weighed:
            return
        self._steps[step] = [self._fetch(step, samples, self._is_mine(k)) for k, samples in enumerate(indices)]
        targets = [samples.targets for samples in self._steps[step]]
        self._weighed[step] = self._shares(targets, list(map(len, indices)))
        if self._compares:
            self._drawn.expect(step, dict(enumerate(map(checksum, targets))))
            self._drawn.check()

    def take(self, step: int, k: int, indices: Indices) -> Samples:
        """Samples of micro-batch ``k``: inputs on the first stage, targets on the last."""
        if self._shares is not None:
            found = self._steps[step][k]
            self._steps[step][k] = Samples(None, None)
            return found
        if not self._place.first:
            return Samples(None, None)
        found = self._fetch(step, indices)
        if self._compares:
            sums = self._sums.setdefault(step, {})
            sums[k] = checksum(found.targets)
            if all(one in sums for one in range(self._batches.count(step)) if self._is_mine(one)):
                self._drawn.tell(step, self._sums.pop(step))
        return found

    def share(self, step: int, k: int) -> float:
        """Share of micro-batch ``k`` in the step's loss on the last stage; 1 on other stages."""
        return self._weighed[step][k] if self._shares is not None else 1.0

    def end(self, step: int) -> None:
        """Forget a step, after the backward of all its micro-batches."""
        self._steps.pop(step, None)
        self._weighed.pop(step, None)

    def begin_test(self, step: int) -> None:
        """Prepare the evaluation after ``step`` steps. The test set may be, or be made of, the training set, which a plain
        loop has told the epoch of the last step; this rank may have taken no micro-batch of that epoch, or not yet any."""
        if self._data is not None and step:
            self._tell(self._batches.last_epoch(step))

    def test(self, k: int, indices: Indices) -> Samples:
        """Samples of micro-batch ``k`` of the test set: inputs on the first stage, targets on the last."""
        place = self._place
        if not place.first and not place.last:
            return Samples(None, None)
        assert self._test is not None
        found = fetch(self._test, indices, None, place.first, place.last or self._compares_tests)
        if self._compares_tests:
            self._tested[k] = checksum(found.targets)
        return found

    def end_test(self, step: int) -> None:
        """End the evaluation after ``step`` steps. Raises UserError if targets differ."""
        sums, self._tested = self._tested, {}
        if sums and self._place.last:
            self._drawn.expect(~step, sums)
            self._drawn.check()
        elif sums:
            self._drawn.tell(~step, sums)

    def close(self, deadline: float, check: Callable[[], None]) -> None:
        """Compare what has not been compared, after the last step. Raises UserError and DeadlineError, and what ``check``
        raises while it waits."""
        if (self._compares or self._compares_tests) and self._place.last:  # never on a member that does not lead
            self._drawn.check_all(deadline, check)

    def _fetch(self, step: int, indices: Indices, mine: bool = True) -> Samples:
        """The samples of a micro-batch; only the targets if another member takes it."""
        assert self._data is not None
        seed = self._tell(self._batches.epoch(step))
        inputs, targets = self._place.first and mine, self._place.last or self._compares
        return fetch(self._data, indices, seed, inputs, targets)

    def _tell(self, epoch: int) -> int:
        """Tell the training set an epoch, if it was told another one last. Returns the seed of that epoch's samples."""
        assert self._data is not None
        seed = mix(AUGMENT, self._batches.seed, epoch)
        if epoch != self._epoch:  # an asynchronous pipeline can be in two at once
            self._epoch = epoch
            begin_epoch(self._data, epoch, seed)
        return seed
