"""What experiments and sweeps keep and show."""

import json
import runpy
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from clocks import Clock
from conftest import ROOT

sys.path.insert(0, str(ROOT / "jobs"))
sys.path.insert(0, str(ROOT / "jobs" / "lab"))

from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.logs.format import STEPS
from accept_mpi.logs.writer import LogWriter
from accept_mpi.pipeline.lion import Lion
from accept_mpi.pipeline.muon import Muon
from accept_mpi.plan import make_plan
from harness import sweep
from harness.experiment import Experiment, combined
from harness.peer import Setting
from harness.store import Store, table
from harness.submodels import measured
from harness.sweep import as_launch, result


def test_results_survive(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "results.h5")
    point = {"codec": "none", "link": 0, "nested": {"a": [1, 2]}}
    assert store.get(point) is None
    store.add(point, {"samples_per_s": 12.5, "each": [1.0, 2.0], "log": "x.h5"})
    store.add({"codec": "auto"}, {"samples_per_s": 3.0})
    again = Store(tmp_path / "deep" / "results.h5")
    found = again.get({"nested": {"a": [1, 2]}, "link": 0, "codec": "none"})  # the order of keys does not matter
    assert found is not None
    assert (found["samples_per_s"], list(found["each"]), found["log"]) == (12.5, [1.0, 2.0], "x.h5")
    assert [row["codec"] for row in again.rows()] == ["none", "auto"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["results.h5"]


def test_a_torn_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.h5"
    store = Store(path)
    store.add({"a": 1}, {"samples_per_s": 1.0})

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(h5py.Group, "create_group", full)
    with pytest.raises(OSError, match="No space"):
        store.add({"a": 2}, {"samples_per_s": 2.0})
    assert Store(path).rows() == [{"a": 1, "samples_per_s": 1.0}]


def test_something_else_under_the_name(tmp_path: Path) -> None:
    (tmp_path / "results.h5").write_bytes(b"not HDF5")
    with pytest.raises(UserError, match="not a file of results"):
        Store(tmp_path / "results.h5")


def test_table() -> None:
    shown = table(["a", "b"], [[1, 123.4], ["x", 0.1234], [None, 12.34]])
    assert shown.splitlines() == ["| a | b |", "| --- | --- |", "| 1 | 123 |", "| x | 0.123 |", "|  | 12.3 |"]


def test_a_run_on_other_ranks_is_another_result(tmp_path: Path) -> None:
    text = '[model]\nname="cnn"\n[data]\nname="digits"\n[train]\nsteps=2\n[output]\ndirectory="r"\n'
    job = parse(text, "job")
    facts = {"hosts": [{"rank": 0}, {"rank": 1}], "versions": {}}
    writer = LogWriter(tmp_path / "log.h5", job.to_json(), make_plan(6, [2]).to_json(), facts)
    writer.append("steps", np.array([(n, 0, 8, 0.5, 0.5, 0.1, n, 8.0) for n in (1, 2)], STEPS))
    writer.event(2.0, 2, "done: no evaluation")
    writer.close()
    found = result(tmp_path / "log.h5", job, 2)
    assert found is not None
    assert (found["plan_cuts"], found["samples_per_s"]) == ("[2]", 8.0)
    assert result(tmp_path / "log.h5", job, 3) is None
    assert result(tmp_path / "log.h5", parse(text, "job", ["train.seed=1"]), 2) is None


def test_losses_are_those_of_runs_that_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves of a way to train ended where one that was interrupted did, and so did the aim."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.experiment.run", lambda main: None)
    text = '[model]\nname="gpt"\n[data]\nname="text"\n[train]\nsteps=2\n[output]\ndirectory="r"\n'
    for name, events in (("whole", ["done: no evaluation"]), ("cut", ["stopped by a signal"])):
        log = Path("runs/quality/gpt-muon") / name / "log.h5"
        log.parent.mkdir(parents=True)
        writer = LogWriter(log, parse(text, "job").to_json(), make_plan(6, [2]).to_json(), {"hosts": [], "versions": {}})
        for event in events:
            writer.event(2.0, 2, event)
        writer.close()
    (found,) = runpy.run_path(str(ROOT / "jobs/experiments/asynchrony/experiment.py"))["runs"]("gpt").values()
    assert [path.parent.name for path in found] == ["whole"]


def test_a_sweep_whose_job_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text('job = "job.toml"\noutput = "out"\n[axes.seed]\n"train.seed" = [0]\n')
    with pytest.raises(UserError, match=r"job\.toml: cannot read the job file: No such file"):
        sweep.run(tmp_path / "sweep.toml", [])


def test_an_experiment_that_need_not_measure_has_a_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["experiment.py"])
    assert Experiment(str(tmp_path / "some" / "experiment.py")).out.resolve() == tmp_path / "runs" / "experiments" / "some"
    assert (tmp_path / "runs" / "experiments" / "some").is_dir()


def test_sub_models_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece's rounds had changed what they return; only measuring the predictor's data anew showed it."""
    job = parse(
        '[model]\nname = "cnn"\n[data]\nname = "digits"\n[train]\nbatch_size = 8\nmicro_batches = 1\nsteps = 1\n'
        '[output]\ndirectory = "r"\n', "job", []
    )  # fmt: skip
    clock = Clock(tick=1e-3)
    for module in ("profiling.layer_timer", "profiling.timed_piece", "device.compute"):
        monkeypatch.setattr(f"accept_mpi.{module}.time", clock)
    found = measured(job, 2)
    layers = len(found["layers"])
    assert [run[0] for run in found["probes"]] == [0, *(run[1] for run in found["probes"][:-1])]
    assert found["probes"][-1][1] == layers
    assert len(found["intervals"]) == len(found["passes"]) == 2
    assert (np.array(found["layers"]) > 0).all()
    whole = next(run for run in found["intervals"] if run[:2] == [0, layers])
    assert sum(whole[2:]) == pytest.approx(np.sum(found["layers"]), rel=0.6), "pieces and the whole model"


@pytest.mark.parametrize(
    ("line", "kind", "key", "value"),
    [
        ('name = "lion"\nbetas = [0.8, 0.9]', Lion, "betas", (0.8, 0.9)), ('name = "adam"', torch.optim.Adam, "eps", 1e-8),
        ('name = "adamw"\nbetas = [0.8, 0.9]', torch.optim.AdamW, "betas", (0.8, 0.9)),
        ('name = "sgd"\nmomentum = 0.9\nnesterov = true', torch.optim.SGD, "nesterov", True),
        ('name = "muon"\nbetas = [0.8, 0.9]', Muon, "betas", (0.8, 0.9)),
    ],
)  # fmt: skip
def test_peers_have_the_optimizer_of_the_job(tmp_path: Path, line: str, kind: type, key: str, value: object) -> None:
    """It was AdamW, with betas of its own, for all but SGD and Muon."""
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\nname = "cnn"\n[data]\nname = "digits"\n[train]\nsteps = 1\n[output]\ndirectory = "r"\n'
        f"[train.optimizer]\n{line}\n"
    )
    setting = Setting({"job": str(job), "tuned": False})
    found = setting.optimizer(setting.layers(0, len(setting.chain)))
    assert type(found) is kind
    assert found.param_groups[0][key] == value


def test_what_ranks_answer_becomes_one_result() -> None:
    """Peers' ranks have timed the same steps, ours and "alone" add up; evaluations are kept in either case."""
    evals = [[10.0, 0.9]]
    answers = [{"samples_per_s": 4.0, "evals": evals}, {"samples_per_s": 6.0, "evals": evals}]
    assert combined("ddp", answers) == {"samples_per_s": 5.0, "evals": evals}
    assert combined("ours", [answers[0], {}]) == {"samples_per_s": 4.0, "each": [4.0], "evals": evals}
    layers = [{"samples_per_s": 0.0, "layer_seconds": [1.0, 2.0]}, {"samples_per_s": 0.0, "layer_seconds": [3.0, 4.0]}]
    assert combined("alone", layers)["layer_seconds"] == [[1.0, 2.0], [3.0, 4.0]]


def test_a_mistake_in_a_sweeps_last_place_is_told_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of runs came first."""
    job = 'model.name = "cnn"\ndata.name = "digits"\ntrain.steps = 1\noutput.directory = "x"\n'
    (tmp_path / "job.toml").write_text(job)
    out = tmp_path / "out"
    (tmp_path / "sweep.toml").write_text(f'job = "job.toml"\noutput = "{out}"\n[axes.rate]\n"train.lr" = [0.1, -0.1]\n')
    ran: list[object] = []
    monkeypatch.setattr(sweep, "_train", lambda *given: ran.append(given))
    with pytest.raises(UserError, match=r"train.lr: expected a number > 0"):
        sweep.run(tmp_path / "sweep.toml", [])
    assert not ran
    assert not out.exists()


def test_runs_whose_labels_differ_in_punctuation_have_folders_of_their_own(tmp_path: Path) -> None:
    """[[0, 1], 2] and [0, [1, 2]] shared one, and the later run took it over."""
    axes = {"a": {"pipeline.ranks": [[[0, 1], 2], [0, [1, 2]], [0, 1, 2]], "label": ["0-2", "0 2", "0/2"]}}
    found = sweep.Sweep("job.toml", str(tmp_path), axes)
    folders = sweep._folders(found, sweep.points(found))
    assert [folder.relative_to(tmp_path).as_posix() for folder in folders] == ["0-2", "0-2-2", "0-2-3"]


def test_places_of_a_sweep() -> None:
    """They may have names, and values may be tables of the job file."""
    optimizer = {"name": "nadam", "betas": [0.9, 0.99], "decay_vectors": False}
    axes = {"way": {"train.optimizer": [optimizer], "label": ["fast"]}, "seed": {"train.seed": [1, 2]}}
    found = sweep.points(sweep.Sweep("job.toml", "out", axes, repeat="seed"))
    assert [sweep.label(point["way"]) for point in found] == ["fast", "fast"]
    assert [sweep.label(point["seed"]) for point in found] == ["1", "2"]
    keys = f"train.optimizer={sweep._toml(optimizer)}", "data.name=x", "model.name=y", "output.directory=z", "train.steps=1"
    chosen = parse("", "job", keys).train.optimizer
    assert (chosen.name, chosen.betas, chosen.decay_vectors) == ("nadam", (0.9, 0.99), False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'job = "\xff"', "byte 7 (0xff) is not UTF-8; save it as UTF-8"),
        ("job = 1".encode("utf-16"), "it is UTF-16"),
        (b'job = "j"\noutput = "o"\nranks = 0\n[axes.a]\n"train.lr" = [1]', "`int` >= 1 - at `$.ranks`"),
        (b'job = "j"\noutput = "o"\n[axes.a]\n"train.lr" = [nan]', "expected a finite number, got nan"),
        (b'job = "j"\noutput = "o"\n[axes.a]\n"train.x" = [2026-01-01]', "2026"),
    ],
)
def test_a_sweeps_file_is_read_as_a_jobs_is(tmp_path: Path, content: bytes, message: str) -> None:
    """There were tracebacks, and no ranks were as many as mpirun found cores."""
    path = tmp_path / "sweep.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        sweep.read(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_a_sweep_with_a_byte_order_mark_or_no_end(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_bytes(b'\xef\xbb\xbfjob = "j"\noutput = "/dev/null/x"\n[axes.a]\n"train.lr" = [1]\n')
    assert sweep.read(path).job == "j"
    with pytest.raises(UserError, match="/dev/zero: cannot read the sweep: it is a device"):
        sweep.read(Path("/dev/zero"))
    (tmp_path / "j").write_text('model.name = "cnn"\ndata.name = "digits"\ntrain.steps = 1\noutput.directory = "x"\n')
    with pytest.raises(UserError, match="output: cannot write to /dev/null/x: Not a directory"):
        sweep.run(path, [])


def test_places_of_one_name_are_refused(tmp_path: Path) -> None:
    """The table had the mean of both, as if they were runs of one."""
    path = tmp_path / "sweep.toml"
    for values, more in (([1, "1"], ""), ([1, 2], 'label = ["fast", "fast"]\n')):
        path.write_text(f'job = "job.toml"\noutput = "out"\n[axes.way]\n"train.seed" = {json.dumps(values)}\n{more}')
        with pytest.raises(UserError, match=r"axes\.way: two places are called (1|fast); "):
            sweep.read(path)


def test_a_sweep_reads_a_host_file_as_launch_does(tmp_path: Path) -> None:
    """A line without slots is one rank; to mpirun it is one a core, and the first hosts get all ranks."""
    (tmp_path / "edges").write_text("pi.kitchen.lan\n192.0.2.7 slots=2  # fast\n")
    flags = ["--bind-to", "none", "-hostfile", str(tmp_path / "edges")]
    assert as_launch(flags, tmp_path) == [*flags[:3], str(tmp_path / "hosts")]
    assert (tmp_path / "hosts").read_text() == "pi.kitchen.lan slots=1\n192.0.2.7 slots=2\n"
