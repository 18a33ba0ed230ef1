"""Run under mpirun: ``train_all.py`` with groups that cut gradients into small chunks and pass them on while B goes on, from
the third step on, whether they wait for sums or not. The last line of each rank says how often."""

import runpy
from collections.abc import Sequence
from pathlib import Path

from accept_mpi.codecs import gradient_chunks
from accept_mpi.codecs.gradient_chunks import Gradients
from accept_mpi.comm.group_sum import GroupSum
from accept_mpi.training import early_gradients

gradient_chunks._CHUNK, gradient_chunks._SMALL = 64, 1
early_gradients._STEPS, early_gradients.early_worth = 1, lambda shares_core: -1.0
contribute, calls = GroupSum.contribute_early, 0


def counted(sums: GroupSum, step: int, k: int, gradients: Gradients, scale: float, chunks: Sequence[int]) -> None:
    global calls
    calls += 1
    contribute(sums, step, k, gradients, scale, chunks)


GroupSum.contribute_early = counted  # type: ignore[method-assign]
try:
    runpy.run_path(str(Path(__file__).with_name("train_all.py")))
finally:
    print(f"passed on early: {calls}", flush=True)
