"""Random losses: any ranks, at any point of a run, several at once, also while the others recover. No hang, no wrong result,
no process left behind.

Starting ranks takes longer than training, so one mpirun trains several jobs, and loses ranks on the way, until two are left.
ACCEPT_MPI_CHAOS=200 makes so many losses (default 8); ACCEPT_MPI_FAULT_SEED=N replays a start whose number was printed.
"""

import os
import random
from pathlib import Path

import samples
from conftest import ROOT
from lost_ranks import expected, left_behind, run

from accept_mpi.recovery.checkpoint import Checkpoint

RANKS, JOBS = 6, 4
LOSSES = int(os.environ.get("ACCEPT_MPI_CHAOS", "8"))
SEED = os.environ.get("ACCEPT_MPI_FAULT_SEED")
# Point -> at which of its times in all jobs together a rank may die there (a job has six steps of five micro-batches).
TIMES = {
    "plan": 4, "build": 6, "forward": 120, "backward": 120, "update": 24, "snapshot": 20, "checkpoint": 4, "regroup": 2,
    "move": 2, "end": 4,
}  # fmt: skip


GROUPS = [
    {"pipeline_cuts": [3], "pipeline_ranks": [[0, 1, 2], [3, 4, 5]]},
    {"pipeline_cuts": [2, 4], "pipeline_ranks": [[5, 0], 1, [2, 4]]},
    {"pipeline_cuts": [], "pipeline_ranks": [[0, 1, 2, 3, 4, 5]], "pipeline_schedule": "zero-bubble"},
    {"pipeline_cuts": [3], "pipeline_ranks": [0, [1, 2, 3, 4]], "pipeline_schedule": "gpipe"},
]


def faults(seed: int, jobs: int = JOBS) -> list[str]:
    """Who dies where: two to four of six, some of them together."""
    rng = random.Random(seed)
    victims = rng.sample(range(RANKS), rng.randint(2, 4))
    planned = []
    for victim in victims:
        if planned and rng.random() < 0.3:
            where = planned[-1].partition("@")[2]
        else:
            point = rng.choice(list(TIMES))
            where = f"{point}:{rng.randint(1, max(1, TIMES[point] * jobs // JOBS))}"
        planned.append(f"{victim}@{where}")
    return planned


def test_random_losses(tmp_path: Path) -> None:
    losses, seed = 0, int(SEED) if SEED else 1000
    while losses < (1 if SEED else LOSSES):
        planned = faults(seed)
        what = f"ACCEPT_MPI_FAULT_SEED={seed} ({' '.join(planned)})"
        jobs = [
            samples.write_job(tmp_path / f"{seed}-{k}.toml", samples.CNN, f"run-{seed}-{k}", recovery_replicate_every=1)
            for k in range(JOBS)
        ]
        code, out = run(tmp_path, [ROOT / "tests" / "programs" / "train_all.py", *jobs], " ".join(planned), RANKS)
        assert code == 0, f"{what}: exit code {code}\n{out}"
        for k in range(JOBS):
            samples.assert_equal(Checkpoint(tmp_path / f"run-{seed}-{k}").whole(), expected())
        assert not left_behind(tmp_path), what
        lost = out.count("lost rank") + out.count(" and rank ")
        print(f"{what}: {lost} lost")
        losses, seed = losses + lost, seed + 1


def test_random_losses_of_groups(tmp_path: Path) -> None:
    """The same with stages held by groups: one job per start, since its plan names the ranks."""
    losses, seed = 0, int(SEED) if SEED else 3000
    while losses < (1 if SEED else LOSSES):
        planned, keys = faults(seed, 1), GROUPS[seed % len(GROUPS)]
        what = f"ACCEPT_MPI_FAULT_SEED={seed} ({' '.join(planned)}) {keys}"
        every = 1 if seed // len(GROUPS) % 2 else 1000  # or only local copies, which a lost stage leaves incomplete
        job = samples.write_job(
            tmp_path / f"{seed}.toml", samples.CNN, f"run-{seed}", recovery_replicate_every=every, **keys
        )
        code, out = run(tmp_path, [ROOT / "tests" / "programs" / "train_all.py", job], " ".join(planned), RANKS)
        assert code == 0, f"{what}: exit code {code}\n{out}"
        samples.assert_equal(Checkpoint(tmp_path / f"run-{seed}").whole(), expected())
        assert not left_behind(tmp_path), what
        lost = out.count("lost rank") + out.count(" and rank ")
        print(f"{what}: {lost} lost")
        losses, seed = losses + lost, seed + 1
