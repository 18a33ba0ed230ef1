"""A checkpoint resumes on any number of ranks and any cuts, bit for bit, and exports to the plain whole model."""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import samples
import torch
from conftest import ROOT, Finished, finish, mpirun_command
from lost_ranks import run
from safetensors import safe_open
from safetensors.torch import load_file

from accept_mpi import data, models
from accept_mpi.cli import main
from accept_mpi.job_file import parse
from accept_mpi.launch.run_identity import RunIdentity
from accept_mpi.logs.reader import open_log
from accept_mpi.models.layers import build_layers
from accept_mpi.pipeline.stage import Stage
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.recovery.disk_replicas import DiskReplicas
from accept_mpi.recovery.layer_state import states
from accept_mpi.recovery.manifest import complete
from accept_mpi.seeds import ORDER, mix

ADAM = 'name = "gpt"\nargs = { context = 16, layers = 2, width = 32, heads = 2, dropout = 0.1 }'


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_four_ranks_checkpoint_continues_on_two(mpirun, tmp_path: Path, name: str) -> None:
    job = samples.CNN if name == "cnn" else samples.GPT
    path = samples.write_job(tmp_path / "job.toml", job, train_evaluate_every=0, output_checkpoint_every=2)
    mpirun(4, "-m", "accept_mpi", "train", path)
    straight = Checkpoint(tmp_path / "run").whole()
    steps = job["train"]["steps"]
    assert [c.name for c in complete(tmp_path / "run")][-2:] == [f"step-{2 * ((steps - 1) // 2):08}", f"step-{steps:08}"]
    half = tmp_path / "run" / "checkpoints" / "step-00000004"
    mpirun(2, "-m", "accept_mpi", "train", path, "--resume", half, "--set", "output.directory=again")
    samples.assert_equal(Checkpoint(tmp_path / "again").whole(), straight)
    train = job["train"]
    plain = samples.plain(job).train(steps, train["batch_size"], train["micro_batches"])
    samples.assert_equal(straight, plain)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_asynchronous_adam_resumes_and_keeps_its_log(mpirun, tmp_path: Path, clip: float | None) -> None:
    """The pipeline drains at checkpoints, so a resumed run equals one that went on; optimizer state comes along, and the
    norms that other stages' gradients had before."""
    keys = {"train_evaluate_every": 0, "output_checkpoint_every": 3, "pipeline_schedule": "1f1b-async"}
    keys |= {"train_clip_norm": clip} if clip else {}
    path = samples.write_job(tmp_path / "job.toml", samples.GPT | {"train": samples.GPT["train"] | {"steps": 6}}, **keys)
    adam = ("--set", 'train.optimizer={name="adamw", lr=1e-3, schedule="cosine", warmup_steps=2}')
    mpirun(3, "-m", "accept_mpi", "train", path, *adam)
    straight = Checkpoint(tmp_path / "run").whole()
    half = tmp_path / "run" / "checkpoints" / "step-00000003"
    mpirun(3, "-m", "accept_mpi", "train", path, *adam, "--resume", half)
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), straight)
    with open_log(tmp_path / "run" / "log.h5") as log:
        assert log["steps"]["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "log.1.h5").is_file()


def test_an_evaluation_that_was_due_is_made_when_the_run_goes_on(mpirun, tmp_path: Path) -> None:
    """A signal's checkpoint comes before the evaluation after its step, and the run ends without it."""
    path = samples.write_job(
        tmp_path / "job.toml", samples.CNN | {"train": samples.CNN["train"] | {"batch_size": 500}}, train_steps=9,
    )  # fmt: skip

    def evaluations(directory: str) -> list[tuple[int, float]]:
        with open_log(tmp_path / directory / "log.h5") as log:
            return list(zip(log["evals"]["step"].tolist(), log["evals"]["loss"].tolist(), strict=True))

    best = ("--set", "output.keep_best=loss")
    mpirun(2, "-m", "accept_mpi", "train", path, *best, "--set", "output.directory=straight")
    mpirun(2, "-m", "accept_mpi", "train", path, "--set", "train.steps=3", "--set", "train.evaluate_every=0")
    assert evaluations("run") == []
    for steps in (6, 9):
        mpirun(2, "-m", "accept_mpi", "train", path, *best, "--resume", "run", "--set", f"train.steps={steps}")
    assert evaluations("run") == evaluations("straight")
    assert len(evaluations("run")) == 3


def test_a_run_may_end_without_a_checkpoint(mpirun, tmp_path: Path) -> None:
    path = samples.write_job(tmp_path / "job.toml", samples.CNN, output_checkpoint_at_end=False)
    out = mpirun(2, "-m", "accept_mpi", "train", path).out
    assert complete(tmp_path / "run") == []
    assert "checkpoint" not in out
    out = mpirun(2, "-m", "accept_mpi", "train", path, "--set", "output.checkpoint_every=4").out
    assert [c.name for c in complete(tmp_path / "run")] == ["step-00000004"]
    assert "step-00000004" in out


def test_export_loads_into_the_plain_model(mpirun, tmp_path: Path) -> None:
    path = samples.write_job(tmp_path / "job.toml", samples.CNN, train_steps=2)
    mpirun(3, "-m", "accept_mpi", "train", path, "--quiet")
    model = models.load("cnn", {"width": 8}, 0).whole()
    for out in (tmp_path / "out.safetensors", tmp_path / "out.pt"):
        assert main(["export", str(tmp_path / "run"), str(out)]) == 0
        state = load_file(out) if out.suffix == ".safetensors" else torch.load(out, weights_only=True)
        model.load_state_dict(state, strict=True)
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "x.safetensors")]) == 2


def test_exports_of_the_same_weights_are_the_same_bytes(mpirun, tmp_path: Path) -> None:
    """So that runs can be compared by their files, whatever order a process' dicts have."""
    path = samples.write_job(tmp_path / "job.toml", samples.CNN, train_steps=2)
    mpirun(2, "-m", "accept_mpi", "train", path, "--quiet")
    outs = [tmp_path / f"{n}.safetensors" for n in range(8)]
    for out in outs:
        assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    assert len({out.read_bytes() for out in outs}) == 1
    with safe_open(outs[0], "pt") as file:
        assert file.metadata() == {"step": "2", "model": "cnn"}


NET = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def model(width=6):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def data():
    x = torch.randn(64, 6)
    return TensorDataset(x, x[:, :3].argmax(1)), TensorDataset(x, x[:, :3].argmax(1))
"""
SETTINGS = """
[model]
name = "net:model"
[data]
name = "net:data"
[train]
batch_size = 8
micro_batches = 2
steps = 5
evaluate_every = 0
optimizer = { name = "sgd", lr = 0.1, momentum = 0.9, weight_decay = 0.01 }
[pipeline]
cuts = [1]
[output]
directory = "run"
"""
ADAMW = 'train.optimizer={name = "adamw", lr = 0.001}'


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder of runs that go on, with other settings, from five steps in the middle of an epoch, and what each printed."""
    folder = tmp_path_factory.mktemp("settings")
    (folder / "net.py").write_text(NET)
    job = folder / "job.toml"
    job.write_text(SETTINGS)
    runs: dict[str, list[str]] = {
        "refused": ["train.steps=7", *(f"pipeline.{key}" for key in ("cuts=[2]", "forward=bf16"))],
        "size": ["train.batch_size=16", "train.epochs=2"],
        "size again": ["train.batch_size=40", "train.epochs=2"],
        "seed": ["train.seed=7", "train.steps=8"],
        "adamw": [ADAMW, "train.steps=7"],
        "asynchronous": [ADAMW, "train.steps=7", "pipeline.schedule=1f1b-async"],
        "wider": ["model.args.width=8", "train.steps=7"],
        "same": ["train.steps=10"],
        "straight": ["train.steps=10"],
    }
    changed = folder / "changed.toml"
    changed.write_text(SETTINGS.replace("batch_size = 8", "batch_size = 16").replace("lr = 0.1", "lr = 0.2"))
    calls: list[list[object]] = [[str(job), [], None]]
    for name, overrides in runs.items():
        source = None if name == "straight" else str(folder / ("size" if name == "size again" else "run"))
        if name == "size again":
            source = str(folder / "size" / "checkpoints" / "step-00000006")
        text = str(changed if name == "refused" else job)
        more = [f"output.directory={name}", "output.checkpoint_every=1", "output.keep=0"]
        calls.append([text, [*overrides, *more], source])
    command = [*mpirun_command(2), sys.executable, str(ROOT / "tests" / "programs" / "several_runs.py"), json.dumps(calls)]
    found = finish(command, folder, {}, 240.0)
    assert found.code == 0, found.out
    parts = found.out.split("== ")[2:]
    return folder, dict(zip(runs, parts, strict=True))


def plain(folder: Path, *batches: tuple[int, int, list[int], int]) -> dict[str, torch.Tensor]:
    """The plain loop over batches (epoch, first sample, samples of each micro-batch, seed of the order)."""
    sys.path.insert(0, str(folder))
    try:
        model = models.load("net:model", {}, 0).whole(0)
        train_set = data.load("net:data", {})[0]
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("net", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for epoch, begin, sizes, seed in batches:
        order = np.random.Generator(np.random.Philox(mix(ORDER, seed, epoch))).permutation(64)[begin:]
        for size in sizes:
            part, order = order[:size], order[size:]
            loss = torch.nn.functional.cross_entropy(model(train_set.inputs(part)), train_set.targets(part))
            (loss * (size / sum(sizes))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


FIVE = [(0, 8 * step, [4, 4], 0) for step in range(5)]


def test_a_job_that_has_changed_is_refused(settings: tuple[Path, dict[str, str]]) -> None:
    said = settings[1]["refused"]
    assert "train.batch_size = 16 (was 8), train.lr = 0.2 (was 0.1)" in said
    assert "add --set train.batch_size=16 --set train.lr=0.2" in said
    assert "cuts" not in said.splitlines()[1]
    assert not (settings[0] / "refused").exists()


def test_with_another_batch_size_the_data_go_on_where_they_were(settings: tuple[Path, dict[str, str]]) -> None:
    folder, said = settings
    assert "goes on with train.batch_size = 16 (was 8)" in said["size"]
    rest = [(0, 40, [8, 8], 0), (0, 56, [8], 0), *((1, 16 * step, [8, 8], 0) for step in range(4))]
    samples.assert_equal(Checkpoint(folder / "size").whole(), plain(folder, *FIVE, *rest))
    again = [(0, 40, [8, 8], 0), (0, 56, [8], 0), (1, 0, [20, 20], 0), (1, 40, [20, 4], 0)]
    samples.assert_equal(Checkpoint(folder / "size again").whole(), plain(folder, *FIVE, *again))
    with open_log(folder / "size" / "log.h5") as log:
        assert log["steps"]["epoch"].tolist() == [0, 0, 1, 1, 1, 1]
        assert log["steps"]["samples"].tolist() == [16, 8, 16, 16, 16, 16]
        assert any(b"goes on with train.batch_size" in row["text"] for row in log["events"][:])


def test_with_another_seed_the_epoch_is_seen_to_its_end(settings: tuple[Path, dict[str, str]]) -> None:
    folder, said = settings
    assert "goes on with train.seed = 7 (was 0)" in said["seed"]
    rest = [(0, 8 * step, [4, 4], 0) for step in (5, 6, 7)]
    samples.assert_equal(Checkpoint(folder / "seed").whole(), plain(folder, *FIVE, *rest))


@pytest.mark.parametrize("name", ["adamw", "asynchronous"])
def test_another_optimizer_begins_anew(settings: tuple[Path, dict[str, str]], name: str) -> None:
    folder, said = settings
    assert 'goes on with train.optimizer.name = "adamw" (was "sgd")' in said[name]
    assert "the optimizer starts from nothing" in said[name]
    state = Checkpoint(folder / name).tensors("optimizer", range(3))
    assert {key.partition("/")[0] for key in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert state["step/0.weight"].item() == 2


def test_what_is_frozen_and_trained_again_begins_anew(trained, tmp_path: Path) -> None:
    """Whether or not its stage trains something else meanwhile."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "job.toml").write_text(SETTINGS)
    alone, apart = ("pipeline.cuts=[]", "pipeline.ranks=[0]"), ("pipeline.cuts=[1]", "pipeline.ranks=[0, 1]")
    jobs = [["job.toml", "output.directory=run"]]
    for name, where in (("alone", alone), ("apart", apart)):
        frozen = [*where, f"output.directory={name}", "train.steps=7", 'train.freeze=["2.*"]']
        again = [*apart, f"output.directory={name} again", "train.steps=9", "train.freeze=[]"]
        jobs += [["job.toml", *frozen, "--resume", "run"], ["job.toml", *again, "--resume", name]]
    trained(2, tmp_path, jobs, "train.ema=0.9")
    for name in ("alone", "alone again"):
        ours, theirs = Checkpoint(tmp_path / name), Checkpoint(tmp_path / name.replace("alone", "apart"))
        samples.assert_equal(ours.whole(average=True), theirs.whole(average=True))
        samples.assert_equal(ours.tensors("optimizer", range(3)), theirs.tensors("optimizer", range(3)))
    assert not any("2." in key for key in Checkpoint(tmp_path / "alone").tensors("optimizer", range(3)))


def test_weights_that_do_not_fit_are_a_sentence(settings: tuple[Path, dict[str, str]]) -> None:
    assert 'holds "0.weight" as float32 (6, 6), this model has float32 (8, 6)' in settings[1]["wider"]


def test_the_same_settings_go_on_without_a_word(settings: tuple[Path, dict[str, str]]) -> None:
    folder, said = settings
    assert "goes on with" not in said["same"]
    samples.assert_equal(Checkpoint(folder / "same").whole(), Checkpoint(folder / "straight").whole())
    samples.assert_equal(
        Checkpoint(folder / "same").tensors("optimizer", range(3)),
        Checkpoint(folder / "straight").tensors("optimizer", range(3)),
    )


def test_what_hosts_have_kept_of_another_model_is_passed_over(mpirun, tmp_path: Path, run_name: str) -> None:
    """Under the right names and checksums: the run goes on from its newest sound checkpoint, or begins."""
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, train_steps=4, train_evaluate_every=0)
    wider = models.load("cnn", {"width": 12, "dropout": 0.2}, 0)
    blobs = states(Stage(build_layers(wider, 0, len(wider), 0), parse(job.read_text(), "job"), None, True))
    spill = DiskReplicas(RunIdentity(run_name, 1), socket.gethostname())
    spill.read()
    spill.write(3, blobs)
    spill.wait(10)
    out = mpirun(2, "-m", "accept_mpi", "train", job, "--run", f"{run_name}/2").out
    assert "what hosts have kept of step 3 is passed over" in out
    assert "resumed from" not in out
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), samples.plain(samples.CNN).train(4, 24, 5))


WHILE_NET = """
import os
from torch import nn
import torch

calls = 0

class Meanwhile(nn.Module):
    def forward(self, x):
        global calls
        calls += 1
        if calls == 40 and os.path.exists("meanwhile"):
            os.system("sh meanwhile")
        return x

def model():
    return nn.Sequential(Meanwhile(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

def data():
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    return list(zip(x, y)), list(zip(x[:10], y[:10]))
"""
WHILE_JOB = """
model.name = "net:model"
data.name = "net:data"
pipeline.cuts = "even"
recovery.replicate_every = 1
[train]
batch_size = 20
micro_batches = 4
steps = 40
evaluate_every = 0
optimizer = { name = "sgd", lr = 0.05, momentum = 0.9 }
"""
MEANWHILE = {
    "it is not there for another rank 0": "mv part gone",
    "another run has gone on from there": "mv other/checkpoints/step-00000039 part/checkpoints/",
}


def straight_and_part(folder: Path, trained: Callable[..., list[Finished]]) -> dict[str, torch.Tensor]:
    """Make the run ``part``, of 3 steps, and ``other``, which goes on from there in its own way; returns the weights of a
    run without a pause."""
    (folder / "net.py").write_text(WHILE_NET)
    (folder / "job.toml").write_text(WHILE_JOB)
    other = ["--resume", "part", "train.lr=0.01", "train.steps=39"]
    keys = ["output.directory=straight"], ["output.directory=part", "train.steps=3"], ["output.directory=other", *other]
    trained(1, folder, [["job.toml", *own] for own in keys])
    return Checkpoint(folder / "straight").whole()


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_a_loss_after_resuming(trained, tmp_path: Path, meanwhile: str) -> None:
    """The run goes on from its snapshots, whatever has become of the checkpoint that it began with."""
    expected = straight_and_part(tmp_path, trained)
    (tmp_path / "meanwhile").write_text(MEANWHILE[meanwhile])
    command: list[object] = ["-m", "accept_mpi", "train", "job.toml", "--set", "output.directory=rest", "--resume", "part"]
    code, out = run(tmp_path, command, "0@backward:60", 2)
    assert code == 0, out
    assert "lost rank 0" in out, out
    samples.assert_equal(Checkpoint(tmp_path / "rest").whole(), expected)


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_another_start_after_resuming(trained, tmp_path: Path, run_name: str, meanwhile: str) -> None:
    """The same where all ranks are lost, and ``launch`` starts the run again."""
    expected = straight_and_part(tmp_path, trained)
    command: list[object] = ["-m", "accept_mpi", "train", "job.toml", "--set", "output.directory=rest", "--resume", "part"]
    _, out = run(tmp_path, [*command, "--run", f"{run_name}/1"], "0@backward:60 1@backward:60", 2)
    assert not complete(tmp_path / "rest"), out
    (tmp_path / "meanwhile").write_text("true")
    assert os.system(f"cd {tmp_path} && {MEANWHILE[meanwhile]}") == 0
    code, out = run(tmp_path, [*command, "--run", f"{run_name}/2"], "", 2)
    assert code == 0, out
    assert "resumed from the snapshot that hosts have kept" in out, out
    samples.assert_equal(Checkpoint(tmp_path / "rest").whole(), expected)


def test_what_a_run_began_with_is_lost(trained, tmp_path: Path) -> None:
    """And so are all snapshots: another checkpoint in its place is not taken for it."""
    straight_and_part(tmp_path, trained)
    (tmp_path / "meanwhile").write_text(MEANWHILE["another run has gone on from there"] + "; rm -r part/checkpoints/*3")
    command: list[object] = ["-m", "accept_mpi", "train", "job.toml", "--set", "output.directory=rest", "--resume", "part"]
    code, out = run(tmp_path, [*command, "--set", "recovery.replicate_every=0"], "1@backward:60", 2)
    assert code == 2, out
    assert "does not have the checkpoint of step 3 that the run began with at part" in out, out
