"""The job file: every mistake is one sentence that names the file and the key."""

import pytest
from conftest import ROOT

from accept_mpi.config import Job, parse
from accept_mpi.errors import UserError

GOOD = """
[model]
name = "cnn"
[data]
name = "digits"
[train]
steps = 3
[output]
directory = "run"
"""


def test_defaults_and_json() -> None:
    job = parse(GOOD, "job.toml")
    assert job.train.batch_size == 64
    assert job.pipeline.schedule == "1f1b"
    assert Job.from_json(job.to_json()) == job


def test_shipped_jobs_parse() -> None:
    jobs = [path for path in sorted((ROOT / "jobs").rglob("*.toml")) if "\n[model]\n" in f"\n{path.read_text()}"]
    assert len(jobs) >= 10  # besides fleets and sweeps
    for path in jobs:
        parse(path.read_text(), str(path))


def test_overrides() -> None:
    job = parse(GOOD, "job.toml", ["train.lr=0.01", "pipeline.cuts=[2,4]", "pipeline.schedule=gpipe", "model.args.width=8"])
    assert job.lr == 0.01
    assert job.pipeline.cuts == [2, 4]
    assert job.pipeline.schedule == "gpipe"
    assert job.model.args == {"width": 8}
    assert parse(GOOD, "j", ["pipeline.cuts=even"]).pipeline.cuts == "even"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.epoch=3"], 'job.toml: unknown key "train.epoch"; did you mean "epochs"?'),
        (["trian.steps=3"], 'job.toml: unknown key "trian"; did you mean "train"?'),
        (["train.optimizer.momentun=0.9"], 'unknown key "train.optimizer.momentun"; did you mean "momentum"?'),
        (["train.steps=ten"], 'job.toml: train.steps: expected `int | null`, got "ten"'),
        (["train.batch_size=0"], "train.batch_size: expected `int` >= 1, got 0"),
        (["train.optimizer.lr=-1"], "train.optimizer.lr: expected `float` > 0.0, got -1"),
        (["pipeline.schedule=2f2b"], 'expected one of "gpipe", "1f1b", "1f1b-async", "zero-bubble", got "2f2b"'),
        (["train.epochs=2"], "give either epochs or steps"),
        (["train.micro_batches=100"], "a micro-batch needs at least one sample"),
        (["pipeline.vertical_sync=true"], 'goes with schedule = "1f1b-async" only'),
        (["pipeline.cuts=odd"], 'pipeline.cuts: expected "auto" or "even" or a list of numbers, got "odd"'),
        (["pipeline.cuts=[0,2]"], "pipeline.cuts"),
        (["lr"], 'expected "section.key=value"'),
        (["model.name.x=1"], '"name" is not a table'),
    ],
)
def test_mistakes_are_sentences(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(GOOD, "job.toml", overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_key_and_bad_toml() -> None:
    with pytest.raises(UserError, match=r'job.toml: missing key "model"'):
        parse(GOOD.replace('[model]\nname = "cnn"', ""), "job.toml")
    with pytest.raises(UserError, match=r'job.toml: missing key "data.name"'):
        parse(GOOD.replace('name = "digits"', ""), "job.toml")
    with pytest.raises(UserError, match=r"job.toml: not valid TOML: .*line 2"):
        parse("[model]\nname = \n", "job.toml")
