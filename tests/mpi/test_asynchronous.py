"""The asynchronous schedule equals, bit for bit, a replay of PipeDream's stale-weight arithmetic in one process."""

from pathlib import Path

import samples
import torch
from conftest import ROOT
from stale_weights import replay

from accept_mpi.recovery.checkpoint import Checkpoint


def test_equals_a_replay_of_stale_weights(mpirun, tmp_path: Path) -> None:
    cases = [
        (name, ranks, slack, vertical)
        for name in ("cnn", "gpt")
        for ranks, slack, vertical in ((1, 0, False), (3, 0, False), (3, 1, False), (4, 1, True))
    ]
    jobs: dict[int, list[Path]] = {}
    for case in cases:
        name, ranks, slack, vertical = case
        directory = f"{name}-{ranks}-{slack}-{vertical}"
        keys = {"pipeline_transfer_slack": slack, "pipeline_vertical_sync": vertical, "train_evaluate_every": 0}
        job = samples.CNN if name == "cnn" else samples.GPT
        path = samples.write_job(tmp_path / f"{directory}.toml", job, directory, pipeline_schedule="1f1b-async", **keys)
        jobs.setdefault(ranks, []).append(path)
    for ranks, paths in jobs.items():
        mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *paths)
    different = 0
    for name, ranks, slack, vertical in cases:
        job = samples.CNN if name == "cnn" else samples.GPT
        ours = Checkpoint(tmp_path / f"{name}-{ranks}-{slack}-{vertical}").whole()
        samples.assert_equal(ours, replay(job, ranks, slack, vertical))
        train = job["train"]
        plain = samples.plain(job).train(train["steps"], train["batch_size"], train["micro_batches"])
        different += any(not torch.equal(ours[n], plain[n]) for n in ours)
    assert different == 6, "with more than one stage weights are stale, so the result differs from synchronous training"
