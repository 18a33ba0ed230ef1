"""Plans that measuring makes, ranks in other orders, and ranks that stay idle: the same weights, whatever the plan."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import samples
from conftest import ROOT

from accept_mpi.cli import main
from accept_mpi.job import Job
from accept_mpi.logs.format import KINDS
from accept_mpi.logs.reader import open_log
from accept_mpi.plan import Plan
from accept_mpi.prediction.database import library
from accept_mpi.recovery.checkpoint import Checkpoint

SPARSE = {"reversed": [3, 2, 1, 0], "idle-0": [2, 1], "idle-others": [0, 3], "one": [2]}


def expected() -> dict[str, object]:
    train = samples.CNN["train"]
    return samples.plain(samples.CNN).train(train["steps"], train["batch_size"], train["micro_batches"])


def test_other_orders_and_idle_ranks(mpirun, tmp_path: Path) -> None:
    """Synchronous and "auto" codecs that end as "none": equal to one process, rank 0 among the idle."""
    jobs = [
        samples.write_job(
            tmp_path / f"{name}.toml", samples.CNN, name, pipeline_cuts="even", pipeline_ranks=ranks, train_evaluate_every=1
        )
        for name, ranks in SPARSE.items()
    ]
    mpirun(4, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    weights = expected()
    for name, ranks in SPARSE.items():
        samples.assert_equal(Checkpoint(tmp_path / name).whole(), weights)
        with open_log(tmp_path / name / "log.h5") as log:
            assert set(log["trace"]["rank"]) == set(ranks)
            assert len(log["evals"]) == 1


def test_auto_codecs_with_an_idle_rank(mpirun, tmp_path: Path) -> None:
    keys = {"pipeline_forward": "auto", "pipeline_backward": "auto", "pipeline_cuts": "even", "pipeline_ranks": [2, 0]}
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, "run", **keys)
    mpirun(3, "-m", "accept_mpi", "train", job)
    with open_log(tmp_path / "run" / "log.h5") as log:
        plan = Plan.from_json(log.attrs["plan"])
    assert [stage.ranks for stage in plan.stages] == [(2,), (0,)]
    assert "auto" not in plan.boundaries[0].forward


def test_a_host_that_measured_itself_wrong_is_asked_again(mpirun, tmp_path: Path) -> None:
    """Of four equal hosts one measured itself at 1.66 of the others, and got so much less of the model."""
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN, "run", train_steps=1, train_evaluate_every=0, pipeline_cuts="auto",
        pipeline_latency_db=str(tmp_path / "latency.h5"), pipeline_probe_seconds=1.0,
    )  # fmt: skip
    assert "3 timed twice" in mpirun(3, ROOT / "tests" / "programs" / "one_measured_slow.py", job).out
    with open_log(tmp_path / "run" / "log.h5") as log:
        forward = log["survey"]["times"][0]
    assert forward.sum(axis=1).max() < 2 * forward.sum(axis=1).min()
    kept = [one.layer_times[:, 0].sum() for one in library(tmp_path / "latency.h5")]
    assert len(kept) == 3
    assert max(kept) < 2 * min(kept)


def test_codecs_of_cuts_that_are_found_are_the_plans(mpirun, tmp_path: Path) -> None:
    """Stages measured once more before the first step are cold, and seemed to leave time for transfers that they did not
    leave (codecs milder than a link carries: a fifth of the speed)."""
    sleepy = samples.CNN | {"model": 'name = "slow_layers:cnn"\nargs = { width = 8, dropout = 0.2 }'}
    job = samples.write_job(
        tmp_path / "job.toml", sleepy, "run", train_steps=1, train_evaluate_every=0, pipeline_cuts="auto",
        pipeline_groups=False,
        pipeline_forward="auto", pipeline_backward="auto", pipeline_latency_db="none", pipeline_probe_seconds=1.0,
    )  # fmt: skip
    out = mpirun(2, "-m", "accept_mpi", "train", job).out
    assert out.count("a step should take") == 1, out
    with open_log(tmp_path / "run" / "log.h5") as log:
        (boundary,) = Plan.from_json(log.attrs["plan"]).boundaries
    row = next(line for line in out.splitlines() if line.startswith("0 "))
    assert boundary.forward in row.split(), (boundary, row)
    assert boundary.backward in row.split(), (boundary, row)


def test_asynchronous_plans_keep_weights_new_where_links_are_fast(mpirun, tmp_path: Path) -> None:
    sleepy = samples.CNN | {"model": 'name = "slow_layers:cnn"\nargs = { width = 8, dropout = 0.2 }'}
    job = samples.write_job(
        tmp_path / "job.toml", sleepy, "run", train_steps=4, train_evaluate_every=0, pipeline_cuts="auto",
        pipeline_schedule="1f1b-async", pipeline_groups=False, pipeline_latency_db="none", pipeline_probe_seconds=1.0,
    )  # fmt: skip
    out = mpirun(2, "-m", "accept_mpi", "train", job).out
    with open_log(tmp_path / "run" / "log.h5") as log:
        plan, trace = Plan.from_json(log.attrs["plan"]), log["trace"][:]
    assert plan.slack < 2
    assert f"(transfer_slack {plan.slack}), so weights are newer" in out
    mine = np.sort(trace[trace["rank"] == plan.stages[0].ranks[0]], order="start")
    change = [(mine["kind"] == KINDS.index(kind)).astype(int) for kind in "FB"]
    assert np.cumsum(change[0] - change[1]).max() == 2 + plan.slack


def test_resuming_with_other_ranks_idle(mpirun, tmp_path: Path) -> None:
    half = samples.write_job(tmp_path / "half.toml", samples.CNN, "half", train_steps=3, pipeline_cuts="even")
    whole = samples.write_job(tmp_path / "whole.toml", samples.CNN, "whole", pipeline_cuts="even", pipeline_ranks=[2, 0])
    mpirun(2, "-m", "accept_mpi", "train", half)
    mpirun(3, "-m", "accept_mpi", "train", whole, "--resume", tmp_path / "half")
    samples.assert_equal(Checkpoint(tmp_path / "whole").whole(), expected())


def test_cuts_by_measuring(mpirun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default: a plan is found, printed and kept, and weights are what they always are. Afterwards the plan command
    finds it again in the log."""
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, "run", pipeline_cuts="auto", pipeline_probe_seconds=0.5)
    out = mpirun(3, "-m", "accept_mpi", "train", job).out
    assert "a step should take" in out
    assert "measuring took" in out
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), expected())
    assert main(["plan", str(job), "--log", str(tmp_path / "run" / "log.h5")]) == 0
    shown = capsys.readouterr().out
    first = next(line for line in out.splitlines() if line.startswith("0 "))
    assert first.split()[:6] == next(line for line in shown.splitlines() if line.startswith("0 ")).split()[:6]
    assert re.search(r"the run itself took .*, over (1 stage|[2-9] stages)$", shown, re.M)


def test_more_ranks_than_layers_leave_some_idle(mpirun, tmp_path: Path) -> None:
    model = {**samples.CNN, "model": 'name = "toys:two"', "train": samples.CNN["train"] | {"steps": 1}}
    (tmp_path / "toys.py").write_text("from torch import nn\ndef two():\n    return [nn.Flatten(), nn.Linear(192, 10)]\n")
    job = samples.write_job(tmp_path / "job.toml", model, "run", pipeline_cuts="auto", pipeline_probe_seconds=0.2)
    out = mpirun(4, "-m", "accept_mpi", "train", job).out
    assert "idle" in out


def test_data_that_only_some_ranks_have(mpirun, tmp_path: Path) -> None:
    """Rank 1 cannot load it: it is neither first nor last."""
    (tmp_path / "some.py").write_text(
        "import os\nfrom accept_mpi import data\nfrom accept_mpi.errors import UserError\n"
        "def digits():\n"
        "    if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n        raise UserError('no such file')\n"
        "    return data.load('digits', {'size': 8})\n"
    )
    sample = {**samples.CNN, "data": 'name = "some:digits"'}
    job = samples.write_job(tmp_path / "job.toml", sample, "run", pipeline_cuts="auto", pipeline_probe_seconds=0.3)
    mpirun(3, "-m", "accept_mpi", "train", job)
    with open_log(tmp_path / "run" / "log.h5") as log:
        plan = Plan.from_json(log.attrs["plan"])
    assert plan.place(1).stage not in (0, len(plan.stages) - 1) or plan.place(1).idle
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), expected())


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "return [nn.Flatten(), nn.Linear(64, 10)]",
            'layer 1 "1" cannot take what the layer before gives ((5, 192) float32)',
        ),
        ("return [nn.Flatten(), lambda: 1 / 0]", 'layer 1 "1" cannot be built: ZeroDivisionError'),
        ("return [nn.Flatten(), nn.Linear(192, 1 << 40, device='meta')]", "alone needs"),
    ],
)
def test_models_that_cannot_be_planned(mpirun, tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "toys.py").write_text(f"from torch import nn\ndef toy():\n    {code}\n")
    job = samples.write_job(
        tmp_path / "job.toml",
        {**samples.CNN, "model": 'name = "toys:toy"'},
        pipeline_cuts="auto",
        pipeline_probe_seconds=0.2,
    )
    out = mpirun(2, "-m", "accept_mpi", "train", job, code=2).out
    assert out.count(message) == 1, out
    assert "Traceback" not in out


def test_a_rank_without_memory_for_any_stage(mpirun, tmp_path: Path) -> None:
    """It is left idle, and neither compiles kernels nor measures, which would take more memory than it has."""
    poor = samples.CNN | {"model": 'name = "little_memory:mlp"\nargs = { memory = 1e9, poor = 1 }'}
    keys = {"pipeline_forward": "auto", "pipeline_backward": "auto", "pipeline_probe_seconds": 0.3}
    job = samples.write_job(tmp_path / "job.toml", poor, "run", pipeline_cuts="auto", **keys)
    found = mpirun(3, "-m", "accept_mpi", "train", job)
    assert re.search(r"left idle, since they have no memory for any stage: \S+ \(rank 1\)", found.out)
    with open_log(tmp_path / "run" / "log.h5") as log:
        assert 1 not in Plan.from_json(log.attrs["plan"]).leaders


def test_no_latency_database_where_none_is_wanted(mpirun, tmp_path: Path) -> None:
    """And one at a path of the job's, with an entry for this model; damaged, it is set aside with a warning."""
    keys = {"pipeline_cuts": "auto", "pipeline_probe_seconds": 0.3, "train_steps": 1, "train_evaluate_every": 0}
    database = tmp_path / "kept" / "times.h5"
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, "run", pipeline_latency_db=str(database), **keys)
    assert "0 of 2 devices were known" in mpirun(2, "-m", "accept_mpi", "train", job).out
    out = mpirun(2, "-m", "accept_mpi", "train", job, "--set", "train.steps=8").out
    assert "2 of 2 devices were known" in out
    assert re.search(r"planning    \d+\.\d s, \d+ % of the run", out)
    with h5py.File(database) as file:
        (model,) = (group for name, group in file.items() if name != "predictor")  # learned where the budget ended too soon
        pieces, observed = next(
            (group["pieces"][:], group["observed"][:]) for name, group in model.items() if name != "outline"
        )
    assert len(observed)  # what the stages took in training
    assert (pieces[:, 2:] > 0).all()
    assert (observed[:, 2:] > 0).all()
    database.write_bytes(database.read_bytes()[:2000])
    out = mpirun(2, "-m", "accept_mpi", "train", job).out
    assert "0 of 2 devices were known" in out
    assert "it is kept as" in out
    other = samples.write_job(tmp_path / "other.toml", samples.CNN, "other", pipeline_latency_db="none", **keys)
    assert "0 of 2 devices were known" in mpirun(2, "-m", "accept_mpi", "train", other).out


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_number_of_micro_batches_is_found_and_kept(mpirun, tmp_path: Path, ranks: int) -> None:
    """The weights are those of one process with that number; a resumed run keeps it, on other ranks, too."""
    keys = {
        "train_micro_batches": "auto", "pipeline_cuts": "auto", "pipeline_probe_seconds": 0.2, "train_evaluate_every": 0,
        "pipeline_latency_db": str(tmp_path / "latency.h5"), "pipeline_forward": "none", "pipeline_backward": "none",
    }  # fmt: skip
    whole = samples.write_job(tmp_path / "whole.toml", samples.CNN, "whole", **keys)
    said = mpirun(ranks, "-m", "accept_mpi", "train", whole).out
    with open_log(tmp_path / "whole" / "log.h5") as log:
        count = Job.from_json(log.attrs["job"]).train.micro_batches
        assert log["trace"]["micro_batch"].max() == count - 1
    assert ranks == 1 or f"micro-batches: {count} a step" in said
    train = samples.CNN["train"]
    weights = samples.plain(samples.CNN).train(train["steps"], train["batch_size"], count)
    samples.assert_equal(Checkpoint(tmp_path / "whole").whole(), weights)
    part = samples.write_job(tmp_path / "part.toml", samples.CNN, "part", **keys | {"train_steps": 2})
    mpirun(ranks, "-m", "accept_mpi", "train", part, "--quiet")
    rest = samples.write_job(tmp_path / "rest.toml", samples.CNN, "rest", **keys)
    mpirun(2, "-m", "accept_mpi", "train", rest, "--quiet", "--resume", "part")
    with open_log(tmp_path / "part" / "log.h5") as log:
        count = Job.from_json(log.attrs["job"]).train.micro_batches
    weights = samples.plain(samples.CNN).train(train["steps"], train["batch_size"], count)
    samples.assert_equal(Checkpoint(tmp_path / "rest").whole(), weights)
