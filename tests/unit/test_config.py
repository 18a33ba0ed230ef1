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


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        ("steps = 3\nlr = 0.5", "train.optimizer.lr=0.01", (3, None, 0.01)),
        ("steps = 3\noptimizer = { lr = 0.5 }", "train.lr=0.01", (3, None, 0.01)),
        ("steps = 3\nlr = 0.5", "train.optimizer={lr=0.01}", (3, None, 0.01)),
        ("steps = 3\nlr = 0.5", "train.optimizer.momentum=0.9", (3, None, 0.5)),
        ("epochs = 2", "train.steps=3", (3, None, 0.05)),
        ("steps = 3", "train.epochs=2", (None, 2, 0.05)),
    ],
)
def test_an_override_drops_the_key_that_says_the_same(text: str, override: str, expected: tuple) -> None:
    job = parse(GOOD.replace("steps = 3", text), "job.toml", [override])
    assert (job.train.steps, job.train.epochs, job.lr) == expected


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("steps = 3\nepochs = 2", [], "train: give either epochs or steps"),
        ("steps = 3", ["train.steps=3", "train.epochs=2"], "train: give either epochs or steps"),
        ("steps = 3\nlr = 0.1\noptimizer.lr = 0.2", [], "train: give either lr or optimizer.lr"),
        ("steps = 3", ["train.lr=0.1", "train.optimizer.lr=0.2"], "train: give either lr or optimizer.lr"),
    ],
)
def test_two_keys_that_say_the_same(text: str, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(GOOD.replace("steps = 3", text), "job.toml", overrides)


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
        (["train.steps=ten"], 'job.toml: train.steps: expected a whole number >= 1, got "ten"'),
        (["train.batch_size=0"], "train.batch_size: expected a whole number >= 1, got 0"),
        (["train.optimizer.lr=-1"], "train.optimizer.lr: expected a number > 0, got -1"),
        (["pipeline.schedule=2f2b"], 'expected one of "gpipe", "1f1b", "1f1b-async", "zero-bubble", got "2f2b"'),
        (["train.micro_batches=100"], "a micro-batch needs at least one sample"),
        (["pipeline.vertical_sync=true"], 'goes with schedule = "1f1b-async" only'),
        (["pipeline.cuts=odd"], 'pipeline.cuts: expected "auto" or "even" or a list of whole numbers >= 1, got "odd"'),
        (["train.lr=fast"], 'job.toml: train.lr: expected a number > 0, got "fast"'),
        (["train.lr=nan"], "train.lr: expected a finite number, got nan"),
        (["train.lr=inf"], "train.lr: expected a finite number, got inf"),
        (["pipeline.timeout=inf"], "pipeline.timeout: expected a finite number, got inf"),
        (["train.seed=99999999999999999999"], "train.seed: expected a number of at most 64 bits"),
        (["train.optimizer={name='adam', betas=[0.9, nan]}"], "betas[1]: expected a number >= 0 and < 1, got NaN"),
        (["train.optimizer.betas=[0.9]"], "train.optimizer.betas: expected a list of 2 numbers, got [0.9]"),
        (["model=cnn"], 'model: expected a table, got "cnn"'),
        (["train.drop_last=1"], "train.drop_last: expected true or false, got 1"),
        (["pipeline.forward=3"], "pipeline.forward: expected a text or a list of texts, got 3"),
        (["pipeline.adapt=x"], 'pipeline.adapt: expected true or false or a whole number >= 1, got "x"'),
        (["train.threads=100000"], 'expected a whole number >= 1 and <= 1024 or "auto", got 100000'),
        (["lr=0.1"], 'unknown key "lr"; did you mean "train.lr"?'),
        (["train.momentum=0.9"], 'unknown key "train.momentum"; did you mean "train.optimizer.momentum"?'),
        (["epoch=3"], 'unknown key "epoch"; did you mean "train.epochs"?'),
        (["train.optimizer.nesterov=true"], "train.optimizer.nesterov = true needs a momentum"),
        (["train.optimizer={name='adam', momentum=0.9}"], 'momentum goes with name = "sgd" only; leave it out for "adam"'),
        (["train.optimizer.betas=[0.9, 0.99]"], 'betas goes with name = "adam" or "adamw" only'),
        (["train.optimizer.final_lr=0.1"], 'final_lr goes with schedule = "cosine" only; leave it out for "constant"'),
        (["train.optimizer.decay=0.5"], 'decay goes with schedule = "step" only'),
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
