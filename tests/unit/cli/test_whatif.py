"""Surveys of what is not there: fleets on paper, more devices, other links; kept in HDF5 and read back."""

import json
import math
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pytest
from clusters import cluster
from clusters import job as planner_job

from accept_mpi.cli import main, whatif
from accept_mpi.cli import plan as cli_plan
from accept_mpi.cli.whatif import cluster_of_fleet, joined, with_links
from accept_mpi.data import load as load_data
from accept_mpi.device.fleet import Host
from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.logs.writer import LogWriter
from accept_mpi.models import load as load_model
from accept_mpi.plan import make_plan, with_lanes
from accept_mpi.planning.codec_choice import codings_of
from accept_mpi.planning.estimate import estimate
from accept_mpi.planning.planner import plan_for
from accept_mpi.profiling.cluster_profile import ClusterProfile, DeviceProfile
from accept_mpi.profiling.layer_timer import micro_batch
from accept_mpi.profiling.layer_times import nothing_measured
from accept_mpi.profiling.message_costs import MessageCosts
from accept_mpi.profiling.outline import outline_of

JOB = """
[model]
name = "cnn"
args = { width = 8 }
[data]
name = "digits"
args = { size = 8 }
[train]
steps = 1
batch_size = 32
micro_batches = 4
[pipeline]
schedule = "1f1b-async"
probe_seconds = 0.2
[output]
directory = "r"
"""


def test_a_cluster_profile_comes_back_from_hdf5(tmp_path: Path) -> None:
    before = cluster(1, 2, rate=1e6)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        before.write(file.create_group("survey"))
        assert ClusterProfile.read(file["survey"]) == before
        del file["survey/times"]
        with pytest.raises(UserError, match="cannot be read"):
            ClusterProfile.read(file["survey"])


def test_a_slower_link_changes_the_plan() -> None:
    fast = cluster(1, 1, rate=1e9)
    slow = with_links(fast, {"edge1": 0.01})
    assert np.array(slow.rate)[0, 1] == pytest.approx(0.93 * 1e4 / 8)
    assert len(plan_for(fast, planner_job()).plan.stages) == 2
    assert len(plan_for(slow, planner_job()).plan.stages) == 1
    with pytest.raises(UserError, match="no such host; there are edge0, edge1"):
        with_links(fast, {"edge7": 10})


def test_links_of_all_hosts_are_faster_at_once() -> None:
    """10 Mbit/s everywhere; a pair is as fast as its slower host, and ranks of one host do not cross its link."""
    slow, fast = (0.93 * mbit * 1e6 / 8 for mbit in (10, 100))
    three = cluster(1, 1, 1, rate=slow)
    assert np.array(with_links(three, dict.fromkeys(("edge0", "edge1", "edge2"), 100)).rate)[0, 1:] == pytest.approx(fast)
    two = np.array(with_links(three, {"edge0": 100, "edge1": 100}).rate)
    assert (two[0, 1], two[0, 2], two[2, 1]) == pytest.approx((fast, slow, slow))
    rate = [[slow] * 3 for _ in range(3)]
    rate[0][1] = rate[1][0] = 1e10
    devices = [msgspec.structs.replace(device, host=host) for device, host in zip(three.devices, "aab", strict=True)]
    shared = np.array(with_links(ClusterProfile(three.outline, devices, rate, three.latency), {"a": 100, "b": 50}).rate)
    assert shared[0, 1] == shared[1, 0] == 1e10
    assert (shared[0, 2], shared[2, 1]) == pytest.approx((fast / 2, fast / 2))


def test_more_devices_bring_their_links() -> None:
    both = joined(cluster(1, 1, rate=1e6), cluster(2, rate=5e5))
    assert len(both.devices) == 3
    rate = np.array(both.rate)
    assert rate[0, 1] == 1e6
    assert len(plan_for(both, planner_job()).plan.stages) == 3


def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> str:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    assert main(["plan", str(path), *words]) == 0
    return capsys.readouterr().out


def test_plan_for_a_fleet_on_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.toml").write_text('[[hosts]]\nname = "quick"\n[[hosts]]\nname = "slow"\ncpu = 0.25\nlink = 100\n')
    picture = tmp_path / "picture.png"
    words = ("--fleet", str(tmp_path / "fleet.toml"), "--timeline", str(picture))
    out = plan(capsys, tmp_path, *words)
    assert "quick (rank 0)" in out
    assert "even cuts:" in out
    assert "a step should take" in out
    assert picture.stat().st_size > 5000
    found = json.loads(plan(capsys, tmp_path, *words[:2], "--json"))
    assert sum(stage["stop"] - stage["start"] for stage in found["plan"]["stages"]) == 8
    assert found["plan"]["step_seconds"] <= found["even"]["step_seconds"]


def test_lanes_are_drawn_on_their_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An IndexError it was, or the rows of another rank: each lane is a device of the forecast."""
    drawn: list[Any] = []

    def draw(path: Path, trace: Any, *_: Any) -> None:
        path.write_text("a picture")
        drawn.append(trace)

    monkeypatch.setattr(cli_plan, "draw_timeline", draw)
    asked = planner_job("pipeline.lanes=2")
    found = estimate(cluster(1, 1), asked, with_lanes(make_plan(12, [6]), {0: 2, 1: 2}))
    cli_plan._draw(tmp_path / "picture.png", cluster(1, 1), asked, found)
    (trace,) = drawn
    assert {(int(row["rank"]), int(row["stage"]), int(row["lane"])) for row in trace if row["kind"] < 2} == {
        (rank, rank, lane) for rank in (0, 1) for lane in (0, 1)
    }


def test_a_jobs_own_cuts_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    words = ["plan", str(tmp_path / "job.toml"), "--add", "pi4", "--add", "pi5", "--set", "pipeline.ranks=[1, 0]"]
    words += ["--set", "pipeline.cuts=[1]"]
    assert main(words) == 0
    shown = capsys.readouterr().out.partition("the job's own cuts:")[2].splitlines()
    assert [line.split()[:2] for line in shown[2:4]] == [["0", "pi5-new1"], ["1", "pi4-new1"]]
    assert "x the plan's)" in shown[4]
    assert main([*words, "--set", "pipeline.ranks=[1, 2]"]) == 2
    assert "rank 2 of [1, 2]" in capsys.readouterr().err


def test_plan_for_personas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, tmp_path, "--add", "pi5:2", "--link", "pi5-new1=10")
    assert "pi5-new" in out


def test_plan_where_no_time_was_left_to_measure_all_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(plan(capsys, tmp_path, "--add", "pi5:2", "--json", "--set", "pipeline.probe_seconds=0.001"))
    assert 0 < found["plan"]["step_seconds"] < math.inf


def log_of_a_run(directory: Path, weights: float = 1e-3) -> Path:
    """Of the job above, on two devices that take 1 ms for each layer. ``weights``: seconds of what can be put off."""
    job = parse(JOB, "job")
    inputs = micro_batch(load_data(job.data.name, job.data.args)[0], job).inputs
    model = outline_of(load_model(job.model.name, job.model.args, job.train.seed), job, inputs)
    times, costs = [1e-3] * len(model.layers), dict.fromkeys(codings_of(job), 0.0)
    devices = [
        DeviceProfile(host=host, forward=times, backward=times, weight_gradient=[weights] * len(times), update=times,
               encode=costs, decode=costs, seconds_per_byte=0.0, shared=False, memory=1e9) for host in ("one", "other")
    ]  # fmt: skip
    found = ClusterProfile(model, devices, [[1e7] * 2] * 2, [[0.0] * 2] * 2)
    LogWriter(
        directory / "log.h5", job.to_json(), make_plan(len(times), [4]).to_json(), {},
        more=lambda file: found.write(file.create_group("survey")),
    ).close()  # fmt: skip
    return directory / "log.h5"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.batch_size=64", "timed with 8 samples per micro-batch, but train.batch_size = 64 and"),
        ("train.micro_batches=8", "train.micro_batches = 8 make 4; keep their ratio, or run this job"),
        ("pipeline.forward=uniform:4", "this run did not measure what coding with uniform:4 takes; run this job"),
        ("pipeline.backward=auto", "did not measure what coding with bf16, uniform:8, uniform:6, uniform:4, uniform:3"),
        ("pipeline.forward=unifrom:4", 'unknown codec "unifrom:4"; did you mean "uniform"?'),
        ("model.name=gpt", "those of another model than the job's (with other parts frozen, perhaps), or took data of"),
        ("model.args.width=4", "those of another model than the job's"),
        ('train.freeze=["*"]', "with other parts frozen, perhaps"),
        ("train.lora={rank=2,targets=['linear']}", "with other parts frozen, perhaps"),
        ("data.args.size=16", "or took data of another shape"),
        ("train.precision=bf16", "memory format or precision; run this job"),
        ("train.memory_format=contiguous", "or took data of another shape, memory format or precision; run this job"),
        ("train.threads=2", "timed with train.threads = auto, the job asks for 2; run this job to measure anew"),
    ],
)
def test_a_log_that_tells_nothing_of_the_job(
    change: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    assert main(["plan", str(tmp_path / "job.toml"), "--log", str(log_of_a_run(tmp_path)), "--set", change]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_log_that_tells_enough_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the micro-batches take twice as long; what a layer drops out does not change its size, nor does the format's
    name where "auto" found the same."""
    words = ("--log", str(log_of_a_run(tmp_path)), "--json")
    changes = (
        "train.batch_size=64", "train.micro_batches=8", "model.args.dropout=0.5", "train.memory_format=channels_last"
    )  # fmt: skip
    once, twice = (
        json.loads(plan(capsys, tmp_path, *words, *(word for change in sets for word in ("--set", change))))["plan"]
        for sets in ((), changes)
    )
    assert twice["stages"] == once["stages"]
    assert twice["step_seconds"] == pytest.approx(2 * once["step_seconds"], rel=0.2)


def test_zero_bubble_from_a_log_of_another_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it puts off was not measured then; it is not nothing, which would make it 1F1B."""
    words = ("--log", str(log_of_a_run(tmp_path, weights=0.0)), "--json", "--set", "pipeline.groups=false")
    plain, zero_bubble = (
        json.loads(plan(capsys, tmp_path, *words, "--set", f"pipeline.schedule={kind}"))["plan"]["step_seconds"]
        for kind in ("1f1b", "zero-bubble")
    )
    assert zero_bubble < 0.97 * plain


def test_hosts_are_timed_as_their_processes_would_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Threads that have less than a core each wait otherwise: hosts with as many threads shared one measurement."""
    seen: list[str] = []
    outline = cluster(1).outline

    def measure(host: Host, *_: Any) -> Any:
        seen.append(host.name)
        return whatif._Measured(outline, nothing_measured(outline), MessageCosts({}, 0.0, 0.0))

    monkeypatch.setattr(whatif, "_measure_here", measure)
    hosts = [Host("a", 2.0, 2), Host("b", 0.5, 2), Host("c", 0.4, 2), Host("d", 2.0, 2)]
    assert len(cluster_of_fleet(hosts, tmp_path / "job.toml", []).devices) == 4
    assert seen == ["a", "b"]


def test_devices_on_paper_are_in_proportion(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB, "utf-8-sig")  # as some editors do
    hosts = [Host("whole", 1.0), Host("quarter", 0.25, memory=1 << 30)]
    whole, quarter = cluster_of_fleet(hosts, tmp_path / "job.toml", ["pipeline.probe_seconds=0.01"]).devices
    assert whole.seconds_per_message > 0
    assert [quarter.seconds_per_message, quarter.seconds_per_byte, *quarter.forward] == pytest.approx(
        [4 * seconds for seconds in (whole.seconds_per_message, whole.seconds_per_byte, *whole.forward)]
    )
    assert 0.2 * (1 << 30) < quarter.memory < 0.4 * (1 << 30)  # Python and torch have taken their part


def test_what_a_users_code_prints_is_no_part_of_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talks.py").write_text(
        "import os\nfrom accept_mpi.models import ZOO\nprint('imported')\n"
        "def cnn(**args):\n    print('made')\n    os.system('echo shell')\n    return ZOO['cnn'](**args)\n"
    )
    (tmp_path / "job.toml").write_text(JOB.replace('"cnn"', '"talks:cnn"'))
    words = ["plan", "job.toml", "--add", "pi5", "--json", "--set", "pipeline.probe_seconds=0.01"]
    assert main(words) == 0
    assert json.loads(capfd.readouterr().out)["plan"]["stages"][0]["ranks"] == [0]
    assert main([*words, "--set", "model.args.wide=1"]) == 2
    assert "unexpected keyword argument 'wide'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "plan needs devices"),
        (["--add", "pi9"], 'no persona "pi9"'),
        (["--add", "pi5:many"], "expected a persona and how many"),
        (["--log", "none.h5"], "no such log"),
        (["--add", "pi5", "--link", "edge=5"], "no such host"),
        (["--add", "pi4:2", "--set", 'pipeline.forward=["bf16"]', "--set", "pipeline.cuts=[2]"], "name one codec"),
    ],
)
def test_mistakes(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    assert main(["plan", str(path), *words]) == 2
    assert message in capsys.readouterr().err
