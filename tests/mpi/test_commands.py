"""Commands that run under mpirun, or start runs of their own."""

import json
from pathlib import Path

import pytest
import samples

from accept_mpi.cli import main
from accept_mpi.logs.format import KINDS
from accept_mpi.logs.reader import open_log, read_facts
from accept_mpi.pipeline.schedule import actions


def test_doctor(mpirun) -> None:
    out = mpirun(3, "-m", "accept_mpi", "doctor").out
    for word in (
        "Hosts",
        "Versions",
        "Links",
        "torch",
        "bit/s",
        "clock offset",
        "All hosts agree on all versions.",
        "A lost rank",
        "Kernels: compiled",
    ):
        assert word in out, out
    assert out.count("bit/s") == 6


def test_log_and_progress_of_a_run(mpirun, tmp_path: Path) -> None:
    """The log holds every action and transfer once, with times in order, and what was printed."""
    path = samples.write_job(tmp_path / "job.toml", samples.CNN, pipeline_schedule="zero-bubble")
    out = mpirun(3, "-m", "accept_mpi", "train", path).out
    assert "step 6/6  epoch 0  loss" in out
    assert "step 6  test loss" in out
    assert "\x1b[" not in out, "no bar where nobody sees it"
    with open_log(tmp_path / "run" / "log.h5") as log:
        assert log["steps"]["step"].tolist() == [1, 2, 3, 4, 5, 6]
        assert log["evals"]["samples"].tolist() == [359]
        facts, trace = read_facts(log), log["trace"][:]
    assert facts["job"]["train"]["batch_size"] == 24
    assert [stage["ranks"] for stage in facts["plan"]["stages"]] == [[0], [1], [2]]
    assert [host["clock_offset_s"] for host in facts["hosts"]] == [0.0] * 3  # a machine has one clock
    assert facts["parameters"] == sum(p.numel() for p in samples.plain(samples.CNN).model.parameters())
    slack = facts["plan"]["slack"]
    listed = [(rank, a) for rank in range(3) for a in actions("zero-bubble", rank, 3, [5] * 6, slack)]
    for kind in "FBW":  # not every B leaves something to W
        rows = trace[trace["kind"] == KINDS.index(kind)]
        keys = {(r["rank"], r["step"], r["micro_batch"]) for r in rows}
        assert keys == {(rank, a.step + 1, a.micro_batch) for rank, a in listed if a.kind == kind}
        assert len(keys) == 3 * 6 * 5 or kind == "W"
        assert len(rows) == len(keys)
    for kind in ("encode", "send", "decode"):
        rows = trace[(trace["kind"] == KINDS.index(kind)) & (trace["direction"] == 1)]
        assert len(rows) == 2 * 6 * 5
    sends = trace[trace["kind"] == KINDS.index("send")]
    assert (sends["end"] >= sends["start"]).all()
    assert (sends["bytes_wire"] > sends["bytes_raw"]).all()
    assert (sends["stage"] == sends["boundary"] + sends["direction"]).all()


def test_clocks_that_do_not_agree(trained, tmp_path: Path) -> None:
    """A message took less than no time, which trace viewers leave out, and links were said to carry too little."""
    (tmp_path / "net.py").write_text(
        "import os\nfrom torch import nn\nfrom accept_mpi.logs.recorder import Clock\n"
        "now, ahead = Clock.now, 5.0 * (os.environ['OMPI_COMM_WORLD_RANK'] == '0')\n"
        "Clock.now = lambda self: now(self) + ahead\n"
        "def model():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.Linear(9, 10))\n"
    )
    trained(2, tmp_path, [samples.write_job(tmp_path / "job.toml", samples.CNN | {"model": 'name = "net:model"'})])
    with open_log(tmp_path / "run" / "log.h5") as log:
        sends = log["trace"][:][log["trace"]["kind"] == KINDS.index("send")]
    assert {*sends["direction"].tolist()} == {0, 1}
    assert (sends["end"] >= sends["start"]).all()


def test_alone_without_mpirun_and_quiet(tmp_path: Path, monkeypatch, capfd) -> None:
    import subprocess
    import sys

    from conftest import HANGS, environment

    path = samples.write_job(tmp_path / "job.toml", samples.CNN)
    done = subprocess.run(
        [sys.executable, "-m", "accept_mpi", "train", path, "--quiet"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["log         run/log.h5", "checkpoint  run/checkpoints/step-00000006"]


def test_bench_codec(capsys) -> None:
    arguments = ["bench", "codec", "bf16", "uniform:4/256+sr", "--sizes", "4096", "64K", "--repeats", "2"]
    assert main(arguments) == 0
    assert "post-ReLU" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["codec"], row["nbytes"], row["bits"]) for row in rows] == [
        ("bf16", 4096, 16.0), ("uniform:4/256+sr", 4096, 4.125), ("bf16", 65536, 16.0), ("uniform:4/256+sr", 65536, 4.125),
    ]  # fmt: skip
    assert all(0 < row["errors"]["normal"] < 0.05 for row in rows)
    assert main(["bench", "codec", "unifrom:4"]) == 2
    with pytest.raises(SystemExit):
        main(["bench", "codec", "--sizes", "64X"])
    assert 'got "64X"' in capsys.readouterr().err


def test_bench_single(capsys) -> None:
    assert main(["bench", "single", "--model", "cnn", "--steps", "2", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert "accept_mpi, 1 rank" in out
    assert "1.00" in out
