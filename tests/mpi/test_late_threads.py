"""Whichever thread is late, lanes, data planes and groups compute the same bits."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from conftest import ROOT
from stale_weights import delayed, replay

from accept_mpi.recovery.checkpoint import Checkpoint

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)
Case = tuple[str, int | str, list[int], list[Any], int]
"""A schedule, lanes, cuts, ranks and ``transfer_slack``."""
CASES: dict[int, list[Case]] = {
    1: [(schedule, lanes, [], [0], 0) for schedule in ("1f1b", "zero-bubble") for lanes in (3, "F+B")],
    2: [
        ("zero-bubble", 3, [3], [0, 1], 0),
        *[("zero-bubble", 3, [3], [0, 1], 2) for _ in range(4)],  # W's gradients may come before its B's
        ("gpipe", 2, [3], [1, 0], 1),
        ("1f1b-async", 3, [3], [0, 1], 1),
        ("1f1b-delayed", 3, [3], [0, 1], 2),
    ],
    4: [
        ("zero-bubble", 3, [3], [[0, 1], [2, 3]], 0),
        ("zero-bubble", "off", [2, 4], [0, [3, 1], 2], 2),
        ("1f1b-async", "off", [2, 4], [0, [3, 1], 2], 3),
        ("1f1b-delayed", 2, [3], [0, [2, 1, 3]], 0),
    ],
}


def expected(case: Case) -> dict[str, torch.Tensor]:
    schedule, lanes, cuts, ranks, slack = case
    train = samples.CNN["train"]
    if schedule == "1f1b-async":
        sizes = [len(held) if isinstance(held, list) else lanes if isinstance(lanes, int) else 1 for held in ranks]
        return replay(samples.CNN, len(ranks), slack, False, cuts, sizes)
    if schedule == "1f1b-delayed":
        return delayed(samples.CNN, SGD)
    return samples.plain(samples.CNN).train(train["steps"], train["batch_size"], train["micro_batches"])


@pytest.mark.parametrize("ranks", CASES)
def test_weights_do_not_depend_on_who_is_late(mpirun, tmp_path: Path, ranks: int) -> None:
    jobs = []
    for number, (schedule, lanes, cuts, held, slack) in enumerate(CASES[ranks]):
        keys = {"pipeline_schedule": schedule, "pipeline_lanes": lanes, "pipeline_cuts": cuts, "pipeline_ranks": held}
        keys |= {"pipeline_transfer_slack": slack, "train_threads": {"off": 1, "F+B": 2}.get(str(lanes), lanes)}
        keys |= {"train_evaluate_every": 0, "pipeline_timeout": 60.0}
        jobs.append(samples.write_job(tmp_path / f"{number}.toml", samples.CNN, str(number), **keys))
    mpirun(ranks, ROOT / "tests" / "programs" / "train_late.py", ranks, *jobs)
    for number, case in enumerate(CASES[ranks]):
        samples.assert_equal(Checkpoint(tmp_path / str(number)).whole(), expected(case))
