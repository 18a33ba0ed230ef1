"""Training over coded boundaries."""

from pathlib import Path

import pytest
import samples
from conftest import ROOT

from accept_mpi.logs.format import KINDS
from accept_mpi.logs.reader import open_log, read_facts
from accept_mpi.recovery.checkpoint import Checkpoint

CASES = (
    ("none", "none", "none"),
    ("a", "uniform:4", "uniform:4"),
    ("b", "uniform:4", "uniform:4"),
    ("half", "bf16", "fp16"),
    ("entropy", "entropy:3.5", "entropy:4.5"),
    ("again", "entropy:3.5", "entropy:4.5"),
)


def test_coded_runs_repeat_bit_for_bit_learn_and_send_less(mpirun, tmp_path: Path) -> None:
    jobs = []
    for name, forward, backward in CASES:
        keys = {"pipeline_forward": forward, "pipeline_backward": backward, "train_steps": 120, "train_batch_size": 48}
        jobs.append(samples.write_job(tmp_path / f"{name}.toml", samples.CNN, name, **keys))
    mpirun(3, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    samples.assert_equal(Checkpoint(tmp_path / "a").whole(), Checkpoint(tmp_path / "b").whole())
    samples.assert_equal(Checkpoint(tmp_path / "entropy").whole(), Checkpoint(tmp_path / "again").whole())
    sent, accuracy = {}, {}
    for name in ("none", "a", "half", "entropy"):
        with open_log(tmp_path / name / "log.h5") as log:
            sends = log["trace"][:]
            sends = sends[sends["kind"] == KINDS.index("send")]
            sent[name] = sends["bytes_wire"].sum() / sends["bytes_raw"].sum()
            accuracy[name] = float(log["evals"]["accuracy"][-1])
    assert sent["none"] == pytest.approx(1.0, abs=0.05)
    assert sent["half"] == pytest.approx(0.5, abs=0.05)
    assert sent["a"] == pytest.approx(0.14, abs=0.05)
    assert sent["entropy"] == pytest.approx(0.125, abs=0.05)
    assert accuracy["none"] > 0.85
    assert accuracy["entropy"] > accuracy["none"] - 0.08
    assert accuracy["a"] > accuracy["none"] - 0.08


def test_auto_is_in_plan_and_log_and_leaves_no_trace_in_the_model(mpirun, tmp_path: Path) -> None:
    """A run with the codecs that "auto" chose gives the same weights: measuring has changed nothing."""
    auto = samples.write_job(tmp_path / "auto.toml", samples.CNN, "auto", pipeline_forward="auto", pipeline_backward="auto")
    out = mpirun(3, "-m", "accept_mpi", "train", auto).out
    with open_log(tmp_path / "auto" / "log.h5") as log:
        facts = read_facts(log)
    chosen = facts["plan"]["boundaries"]
    assert len(facts["codecs_why"]) == 5
    assert all(line in out for line in facts["codecs_why"])
    assert "auto" not in str(chosen)
    keys = {f"pipeline_{way}": [codec[way] for codec in chosen] for way in ("forward", "backward")}
    fixed = samples.write_job(tmp_path / "fixed.toml", samples.CNN, "fixed", **keys)
    mpirun(3, "-m", "accept_mpi", "train", fixed, "--quiet")
    samples.assert_equal(Checkpoint(tmp_path / "auto").whole(), Checkpoint(tmp_path / "fixed").whole())


def test_a_codec_for_each_boundary_and_wrong_ones(mpirun, tmp_path: Path) -> None:
    job = samples.write_job(tmp_path / "job.toml", samples.CNN)
    mpirun(3, "-m", "accept_mpi", "train", job, "--set", 'pipeline.forward=["bf16", "uniform:2"]')
    for keys, message in (
        ("pipeline.forward=unifrom:4", 'pipeline.forward: unknown codec "unifrom:4"; did you mean "uniform"?'),
        ('pipeline.backward=["bf16"]', "pipeline.backward: 1 codec for 2 boundaries"),
    ):
        out = mpirun(3, "-m", "accept_mpi", "train", job, "--set", keys, code=2).out
        assert out.count(message) == 1, out
