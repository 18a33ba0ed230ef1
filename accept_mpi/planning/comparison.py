"""Says in one line, after some steps, how a run compares with its plan and what is slower than foreseen."""

from collections.abc import Callable, Sequence

import numpy as np

from accept_mpi.logs.format import KINDS, Rows, number_of
from accept_mpi.logs.observers import Observer, StepDone
from accept_mpi.pipeline.deal import Deal
from accept_mpi.plan import Plan, StagePlan
from accept_mpi.profiling.cluster_profile import ClusterProfile

WARM, STEPS = 3, 10
"""First steps, which are slower than others, and those that are compared."""
_NEAR = 1.1
"""Factor up to which something counts as foreseen."""
_COMPUTING = [KINDS.index(kind) for kind in "FBW"]


class PlanCheck(Observer):
    """Watches the first steps of a run on rank 0, and calls ``say`` once."""

    def __init__(
        self, plan: Plan, cluster: ClusterProfile, foreseen: float, micro_batches: int, say: Callable[[int, str], None],
        names: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """``foreseen``: seconds per step; ``micro_batches``: per step; ``say`` gets the step and a line; ``names``: the
        numbers of ranks 0, 1, ... in the trace, if they differ."""
        self._plan, self._cluster, self._foreseen, self._say = plan, cluster, foreseen, say
        self._names = names
        self._ends: list[float] = []
        self._first: int | None = None
        self._rows: list[Rows] = []
        self._missing = {number_of(rank, self._names) for stage in plan.stages for rank in _computing(stage, micro_batches)}
        """Ranks that have not computed the last of the steps yet."""
        self._done = False

    def step(self, done: StepDone) -> None:
        """Take the end of a step."""
        if self._first is None:
            self._first = done.step
        if len(self._ends) < WARM + STEPS:
            self._ends.append(done.end)

    def trace(self, rows: Rows) -> None:
        """Take trace rows; compares once all ranks have computed the steps."""
        if self._done:
            return
        self._rows.append(rows[np.isin(rows["kind"], _COMPUTING)])
        if self._first is None or len(self._ends) < WARM + STEPS:
            return
        first, last = self._first + WARM, self._first + WARM + STEPS - 1
        found = np.concatenate(self._rows)
        self._missing -= set(found["rank"][found["step"] >= last].tolist())
        here = found[(found["step"] >= first) & (found["step"] <= last)]
        self._rows = [here]  # no more than these, however long a rank is missing
        if self._missing:
            return
        self._done, self._rows = True, []
        took = float(np.median(np.diff(self._ends[WARM - 1 :])))
        self._say(last, self.line(took, {rank: self._factor(rank, here) for _, rank in self._plan.holders}))

    def line(self, took: float, factors: dict[int, float]) -> str:
        """The sentence. ``took``: seconds per step; ``factors``: for each rank, the time that it computes as a multiple of
        what was foreseen."""
        text = f"a step takes {1e3 * took:.0f} ms, {1e3 * self._foreseen:.0f} ms were foreseen"
        if took <= _NEAR * self._foreseen:
            return text
        slower = {rank: factor for rank, factor in factors.items() if factor > _NEAR}
        if not slower:
            return f"{text}; ranks compute as fast as foreseen, so links or waiting take the rest"
        named = ((number_of(rank, self._names), self._cluster.devices[rank].host, slower[rank]) for rank in slower)
        each = ", ".join(f"rank {number} ({host}) {factor:.2f} x" for number, host, factor in named)
        return f"{text}; computing takes longer than foreseen on {each}"

    def _factor(self, rank: int, rows: Rows) -> float:
        """Time that a rank computes per micro-batch, as a multiple of what its device was measured to take."""
        mine = rows[rows["rank"] == number_of(rank, self._names)]
        stage = next(stage for stage in self._plan.stages if rank in stage.ranks)
        expected = sum(self._cluster.devices[rank].passes(stage, rank))
        count = np.count_nonzero(mine["kind"] == KINDS.index("F"))
        return float((mine["end"] - mine["start"]).sum()) / count / expected if count and expected else 1.0


def _computing(stage: StagePlan, micro_batches: int) -> set[int]:
    """The ranks of a stage that take any of a step's micro-batches: a far slower member of a group may get none."""
    return {stage.ranks[member] for member in Deal.of(stage).table(micro_batches)}
