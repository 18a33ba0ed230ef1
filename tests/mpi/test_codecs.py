"""Training over coded boundaries."""

from pathlib import Path

import pytest
import samples
from conftest import ROOT
from lost_ranks import run

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


BASIS = {"pipeline_forward": "entropy:3+basis", "pipeline_backward": "entropy:3"}


def test_a_basis_of_activations(trained, tmp_path: Path) -> None:
    """It is learned in step 9, comes with step 13's first message, and repeats bit for bit, in any synchronous schedule."""
    keys = {"train_steps": 20, "train_evaluate_every": 10}
    path = samples.write_job(tmp_path / "job.toml", samples.GPT, "run", **BASIS, **keys)
    runs: dict[str, tuple[str, ...]] = {
        "one": (),
        "again": (),
        "zb": ("pipeline.schedule=zero-bubble",),
        "recomputed": ("pipeline.recompute=on",),
        "short": ("train.steps=12",),
        "short_plain": ("train.steps=12", "pipeline.forward=entropy:3"),
        "plain": ("pipeline.forward=entropy:3",),
        "async": ("pipeline.schedule=1f1b-async",),
        "lanes": ("pipeline.lanes=2",),
    }
    trained(3, tmp_path, [(path, f"output.directory={name}", *more) for name, more in runs.items()])
    weights = {name: Checkpoint(tmp_path / name).whole() for name in runs}
    for name in "again", "zb", "recomputed", "lanes":
        samples.assert_equal(weights[name], weights["one"])
    samples.assert_equal(weights["short"], weights["short_plain"])
    assert any(not value.equal(weights["plain"][key]) for key, value in weights["one"].items())
    with open_log(tmp_path / "one" / "log.h5") as log:
        sends = log["trace"][:]
    sends = sends[(sends["kind"] == KINDS.index("send")) & (sends["direction"] == 0) & (sends["step"] > 0)]
    usual = sends[sends["step"] == 2]["bytes_wire"].max()
    assert set(sends[sends["bytes_wire"] > usual]["step"]) == {13}


def test_groups_learn_one_basis(trained, tmp_path: Path) -> None:
    """Whoever takes which micro-batches: that of one rank a stage."""
    path = samples.write_job(tmp_path / "job.toml", samples.GPT, "run", **BASIS, train_steps=20, pipeline_cuts=[2, 4])
    trained(3, tmp_path, [(path, "output.directory=one")])
    grouped = ("pipeline.gradients=exact", "pipeline.ranks=[[0,3],[1,2],4]")
    trained(5, tmp_path, [(path, "output.directory=groups", *grouped)])
    samples.assert_equal(Checkpoint(tmp_path / "groups").whole(), Checkpoint(tmp_path / "one").whole())


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-delayed"])
def test_a_basis_is_part_of_the_state(trained, tmp_path: Path, schedule: str) -> None:
    """Going on from a checkpoint before and after its first use, in the step that it is learned of, and with other cuts."""
    keys = {"pipeline_schedule": schedule, "train_steps": 46, "output_checkpoint_every": 1, "output_keep": 50}
    path = samples.write_job(tmp_path / "job.toml", samples.GPT, "run", **BASIS, **keys)
    folders = {step: f"one/checkpoints/step-{step:08}" for step in (8, 9, 11, 20, 43)}
    starts = [(path, f"output.directory=from{step}", "--resume", folder) for step, folder in folders.items()]
    cut = path, "output.directory=cut", "--resume", "one", "train.steps=50", "pipeline.cuts=[2,3]"
    trained(3, tmp_path, [(path, "output.directory=one"), *starts, cut])
    whole = Checkpoint(tmp_path / "one").whole()
    for step in folders:
        samples.assert_equal(Checkpoint(tmp_path / f"from{step}").whole(), whole)


@pytest.mark.parametrize("faults", ["1@update:12", "3@update:16"])
def test_a_basis_outlives_who_learned_it(tmp_path: Path, faults: str) -> None:
    """The others of a group go on with what they have learned with the lost one."""
    keys = {"pipeline_cuts": [3], "pipeline_ranks": [[0, 1], [2, 3]], "pipeline_gradients": "exact", "train_steps": 20}
    ends = []
    for name, killed in (("whole", ""), ("run", faults)):
        job = samples.write_job(tmp_path / f"{name}.toml", samples.GPT, name, **BASIS, **keys)
        code, out = run(tmp_path, ["-m", "accept_mpi", "train", job, "--quiet"], killed, 4)
        assert code == 0, out
        assert ("2 stages go on" in out) == bool(killed), out
        ends.append(Checkpoint(tmp_path / name).whole())
    samples.assert_equal(*ends)


MASKED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 128)
    def forward(self, x):
        return 9 * self.linear(x), torch.where(torch.arange(128) < 40, -1e9, 0.0).expand(len(x), -1).clone()
class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 3)
    def forward(self, given):
        return 9 * self.linear((given[0] + given[1]).softmax(-1))
def model():
    return nn.Sequential(First(), Second())
def data():
    x = torch.randn(70, 128, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x[:64], x[:64, :3].argmax(1)), TensorDataset(x[:37], x[:37, :3].argmax(1))
"""
MASKED_JOB = """
model.name = "net:model"
data.name = "net:data"
train = { batch_size = 32, micro_batches = 2, steps = 6, lr = 0.1 }
pipeline.cuts = [1]
output.directory = "none"
"""


@pytest.mark.parametrize("frozen", ["[]", '["0.*"]'])
def test_masks_cross_as_they_are(trained, tmp_path: Path, frozen: str) -> None:
    """In training and evaluations, whose last micro-batch is a short one; where activations want no gradient either, too."""
    (tmp_path / "net.py").write_text(MASKED)
    (tmp_path / "job.toml").write_text(MASKED_JOB)
    codecs = ("none", "uniform:4", "uniform:8")
    jobs = [("job.toml", f"pipeline.forward={one}", f"output.directory={one}") for one in codecs]
    trained(2, tmp_path, jobs, f"train.freeze={frozen}")
    found = {}
    for one in codecs:
        with open_log(tmp_path / one / "log.h5") as log:
            found[one] = [*log["steps"]["loss"][:].tolist(), *log["evals"]["loss"][:].tolist()]
            told = any(b"go uncoded" in row["text"] for row in log["events"][:])
            assert told == (frozen != "[]" and one != "none")
    for one in codecs[1:]:
        assert found[one] == pytest.approx(found["none"], abs=0.1)
