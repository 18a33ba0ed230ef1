"""Settings that change nothing beside other ones are told; those of usual jobs are not."""

import pytest
from conftest import ROOT

from accept_mpi.idle_settings import without_effect
from accept_mpi.job_file import parse

BASE = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=9\n[output]\ndirectory="r"\n'
CASES = {
    "train.mix": (["train.mix={classes=3, mixup=0.2}", "train.micro_batches=64"], ["train.mix={classes=3, mixup=0.2}"]),
    "train.metrics": (["train.metrics=['top5']", "train.evaluate_every=0"], ["train.metrics=['top5']"]),
    "train.loss": (["train.loss=mse", "model.output=loss"], ["train.loss=mse"]),
    "train.optimizer.decay_vectors": (
        ["train.optimizer.decay_vectors=false"],
        ["train.optimizer={decay_vectors=false, weight_decay=0.1}"],
    ),
    "model.strict": (["model.strict=false"], ["model.strict=false", "model.weights=there.pt"]),
    "pipeline.speeds": (
        ["pipeline.cuts=[2]", "pipeline.ranks=[0, 1]", "pipeline.speeds=[1.0, 2.0]"],
        ["pipeline.cuts=[]", "pipeline.ranks=[[0, 1]]", "pipeline.speeds=[[1.0, 2.0]]"],
    ),
    "pipeline.gradients": (
        ["pipeline.gradients=none", "pipeline.cuts=[2]"],
        ["pipeline.gradients=none", "pipeline.cuts=[]", "pipeline.ranks=[[0, 1]]"],
    ),
    "pipeline.probe_seconds": (
        ["pipeline.probe_seconds=9", "pipeline.cuts=even"],
        ["pipeline.probe_seconds=9", "pipeline.cuts=[2]", "pipeline.adapt=true"],
    ),
    "pipeline.latency_db": (
        ["pipeline.latency_db=a.h5", "pipeline.cuts=[2]"],
        ["pipeline.latency_db=none", "pipeline.cuts=[2]"],
    ),
    "pipeline.recompute": (["pipeline.recompute=on", "pipeline.cuts=[]"], ["pipeline.recompute=on", "pipeline.cuts=[2]"]),
    "pipeline.entropy": (["pipeline.entropy=true"], ["pipeline.entropy=true", "pipeline.backward=['none', 'auto']"]),
    "pipeline.min_bits": (["pipeline.min_bits=4"], ["pipeline.min_bits=4", "pipeline.forward=auto"]),
    "pipeline.transfer_slack": (
        ["pipeline.transfer_slack=1", "pipeline.schedule=gpipe"],
        ["pipeline.transfer_slack=1"],
    ),
    "recovery.mean_time_between_failures": (
        ["recovery.mean_time_between_failures=60", "recovery.replicate_every=5"],
        ["recovery.mean_time_between_failures=60"],
    ),
}


@pytest.mark.parametrize("key", CASES)
def test_what_has_no_effect(key: str) -> None:
    idle, working = ([*without_effect(parse(BASE, "job", keys), True)] for keys in CASES[key])
    assert [line.partition(" ")[0] for line in idle] == [key]
    assert idle[0].startswith(f"{key} has no effect: ")
    assert not working


def test_snapshots_need_an_mpi_that_survives() -> None:
    for key, value in (("replicate_every", 5), ("mean_time_between_failures", 60)):
        job = parse(BASE, "job", [f"recovery.{key}={value}"])
        assert not without_effect(job, True)
        (line,) = without_effect(job, False)
        assert (
            line
            == f"recovery.{key} has no effect: this MPI ends with the first process that is lost (mpirun --with-ft ulfm)"
        )
    assert not without_effect(parse(BASE, "job", ["recovery.replicate_every=0"]), False)


def test_groups_of_parameters_without_settings() -> None:
    job = parse(BASE, "job", ["train.groups=[{names=['a.*']}, {names=['b.*'], lr=0.1}]"])
    assert without_effect(job, True) == ["train.groups: ['a.*'] has no settings of its own"]


def test_usual_jobs_have_none() -> None:
    files = [file for file in sorted((ROOT / "jobs").rglob("*.toml")) if "\n[train]" in file.read_text()]
    assert files
    for file in files:
        assert not without_effect(parse(file.read_text(), str(file)), True), file


def test_fewest_bits_of_sums() -> None:
    """Of "auto" sums, where ranks may hold a stage together; said to have no effect, it had one."""
    sums = ["pipeline.min_bits=8", "pipeline.gradients=auto"]
    assert not without_effect(parse(BASE, "job", sums), True)
    for idle in (["pipeline.groups=false"], ["pipeline.cuts=[2]"]):
        said = without_effect(parse(BASE, "job", [*sums, *idle]), True)
        assert [line.partition(" ")[0] for line in said] == ["pipeline.gradients", "pipeline.min_bits"]


def test_sums_of_what_stages_have_in_common() -> None:
    """Their gradients are summed in that way, too; nobody knows before the model is there."""
    asked = ["pipeline.gradients=none", "pipeline.cuts=[2]"]
    (line,) = without_effect(parse(BASE, "job", asked), True)
    assert line.endswith(": no ranks hold a stage together, unless stages have a parameter in common")
    (line,) = without_effect(parse(BASE, "job", [*asked, "pipeline.schedule=1f1b-async"]), True)
    assert line.endswith(": no ranks hold a stage together")


def test_samples_that_are_alone_are_not_mixed() -> None:
    asked = ["train.mix={classes=3, mixup=0.2}", "train.micro_batches=64", "train.drop_last=true"]
    assert without_effect(parse(BASE, "job", asked), True)
