"""What a job may have otherwise than the checkpoint's job, and where the data go on."""

import json
import shlex
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from accept_mpi import models
from accept_mpi.data.calendar import Calendar, Position
from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.recovery.checkpoint_writer import new_manifest
from accept_mpi.recovery.manifest import Manifest
from accept_mpi.training.resuming import calendar, check, course_of

CHAIN = models.load("cnn", {"width": 4}, 0)
JOB = """
[model]
name = "cnn"
args = { width = 4 }
[data]
name = "digits"
args = { size = 8 }
[train]
batch_size = 8
micro_batches = 2
steps = 20
optimizer = { name = "sgd", lr = 0.1, momentum = 0.9 }
[pipeline]
cuts = [1]
[output]
directory = "run"
"""


BATCHES = Calendar(24, 8, 2, 0)


def parsed(*overrides: str, text: str = JOB) -> Job:
    return parse(text, "job", overrides)


def manifest(job: Job, **fields: Any) -> Manifest:
    about = {"model": "cnn", "model_args": {"width": 4}, "layers": CHAIN.names, "seed": job.train.seed, "samples": 24}
    return new_manifest(**({"step": 4, "epoch": 1, "seen": 8, "run": "r", "job": job.to_json()} | about | fields))


def told(before: Job, now: Job, *overrides: str) -> list[str]:
    return check(manifest(before), now, overrides, CHAIN, calendar(BATCHES, manifest(before)))


@pytest.mark.parametrize(
    "override",
    [
        "pipeline.cuts=even", "pipeline.forward=bf16", "pipeline.timeout=9", "output.directory=again", "output.keep=1",
        "train.steps=99", "train.epochs=9", "train.evaluate_every=0", "train.threads=2", "pipeline.schedule=zero-bubble",
        "train.memory_format=contiguous", "recovery.replicate_every=3", "train.lr=0.1", "pipeline.transfer_slack=0",
    ],
)  # fmt: skip
def test_free(override: str) -> None:
    """Where layers lie, what carries them, how long the run is; and the same value said otherwise."""
    text = JOB.replace("steps = 20", "") if "epochs" in override else JOB
    assert told(parsed(), parsed(override, text=text)) == []


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("train.lr=0.2", "train.lr = 0.2 (was 0.1)", "--set train.lr=0.2"),
        ("train.optimizer.lr=0.2", "train.lr = 0.2 (was 0.1)", "--set train.lr=0.2"),
        ("train.batch_size=16", "train.batch_size = 16 (was 8)", "--set train.batch_size=16"),
        ("train.micro_batches=4", "train.micro_batches = 4 (was 2)", "--set train.micro_batches=4"),
        ("train.seed=7", "train.seed = 7 (was 0)", "--set train.seed=7"),
        ("train.drop_last=true", "train.drop_last = true (was false)", "--set train.drop_last=true"),
        ("train.loss=mse", 'train.loss = "mse" (was "cross_entropy")', "--set train.loss=mse"),
        ("train.optimizer.momentum=0", "train.optimizer.momentum = 0.0 (was 0.9)", "--set train.optimizer.momentum=0.0"),
        ("train.optimizer.nesterov=true", "train.optimizer.nesterov = true", "--set train.optimizer.nesterov=true"),
        ("train.optimizer.weight_decay=0.1", "train.optimizer.weight_decay", "--set train.optimizer.weight_decay=0.1"),
        ("train.optimizer.schedule=cosine", 'schedule = "cosine" (was "constant")', "train.optimizer.schedule=cosine"),
        ("train.optimizer.warmup_steps=5", "train.optimizer.warmup_steps = 5", "--set train.optimizer.warmup_steps=5"),
        ("pipeline.schedule=1f1b-async", 'pipeline.schedule = "1f1b-async" (was "1f1b")', "pipeline.schedule=1f1b-async"),
        ("model.args.dropout=0.5", "model.args.dropout = 0.5 (was not given)", "--set model.args.dropout=0.5"),
        ("data.args.size=16", "data.args.size = 16 (was 8)", "--set data.args.size=16"),
        ('data.args.size="16"', 'data.args.size = "16" (was 8)', """--set 'data.args.size="16"'"""),
        ("model.args.since='2024-01-01'", "model.args.since", """--set 'model.args.since="2024-01-01"'"""),
        ("model.args={width = 4, a = {'é' = '😀'}}", "model.args.a", """--set 'model.args.a={"é" = "😀"}'"""),
        ("data.args={}", "data.args.size = not given (was 8)", "--set 'data.args={}'"),
        ("model.args={width = 4, a = [1, {b = true}]}", "model.args.a", """--set 'model.args.a=[1, {"b" = true}]'"""),
    ],
)
def test_refused_unless_named(override: str, key: str, hint: str) -> None:
    now = parsed(override)
    with pytest.raises(UserError) as error:
        told(parsed(), now)
    said = str(error.value)
    assert key in said
    assert said.endswith(f"where that is meant, add {hint}" if hint.startswith("--set") else hint)
    (first, *_) = told(parsed(), now, override)
    assert key in first
    by_hint = hint.removeprefix("--set ").strip("'")
    assert parsed(by_hint) == parsed(override) or "lr" in override, "what the sentence says to add is the same"
    assert told(parsed(), now, by_hint)[0] == first


def test_other_classes_are_other_data() -> None:
    """Their numbers are in the order of their names, so that a new name may change them all."""
    kept = manifest(parsed(), classes=["bright", "dark"])

    def checked(*classes: str) -> list[str]:
        return check(kept, parsed(), [], CHAIN, calendar(BATCHES, kept), classes)

    assert checked("bright", "dark") == []
    with pytest.raises(UserError, match=r"^--resume: class 0 was bright in training, and is dark in the job's data now$"):
        checked("dark", "light")
    with pytest.raises(UserError, match="class 2 was none in training, and is grey in"):
        checked("bright", "dark", "grey")


def test_another_optimizer() -> None:
    """Only what both know is compared; its state stays behind."""
    overrides = ['train.optimizer={name = "adamw", lr = 0.1}']
    adam = parsed(*overrides)
    with pytest.raises(UserError, match=r'optimizer.name = "adamw" \(was "sgd"\); where') as error:
        told(parsed(), adam)
    assert "momentum" not in str(error.value)
    assert told(parsed(), adam, *overrides)[1].startswith("the optimizer starts from nothing")
    assert told(adam, parsed(), "train.optimizer.name=sgd")[1].startswith("the optimizer starts from nothing")
    assert len(told(adam, parsed('train.optimizer={name = "adam", lr = 0.1}'), "train.optimizer.name=adam")) == 1


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("adam", "lion", "from nothing: "), ("lion", "adam", "from nothing: "), ("nadam", "adam", "from nothing: "),
        ("adam", "nadam", "from nothing: "), ("muon", "adamw", "from nothing for weight matrices: "),
        ("adam", "muon", "from nothing for weight matrices: "), ("nadam", "muon", "from nothing: "), ("adam", "adamw", ""),
    ],
)  # fmt: skip
def test_the_log_says_which_state_is_left_behind(before: str, now: str, said: str) -> None:
    jobs = [parsed(override := f'train.optimizer={{name = "{name}", lr = 0.1}}') for name in (before, now)]
    lines = [line for line in told(*jobs, override) if "the optimizer starts" in line]
    assert len(lines) == bool(said)
    assert not said or said in lines[0]


def test_one_sentence_names_all() -> None:
    now = parsed("train.batch_size=16", "train.seed=7")
    with pytest.raises(
        UserError, match=r"train.batch_size = 16 .*train.seed = 7 .* --set train.batch_size=16 --set train.seed=7"
    ):
        told(parsed(), now)
    with pytest.raises(UserError, match=r"checkpoint's: train.seed"):
        told(parsed(), now, "train.batch_size=16")


def test_other_data_are_refused_by_any_name() -> None:
    overrides = ["data.name=cifar10", 'data.args={path = "x"}']
    with pytest.raises(UserError, match="data that it was trained on"):
        told(parsed(), parsed(*overrides), *overrides)
    with pytest.raises(UserError, match="24 samples, the job's data has 25"):
        check(manifest(parsed()), parsed(), [], CHAIN, replace(BATCHES, samples=25))


def test_what_an_earlier_version_wrote() -> None:
    """Keys that its job had not are those of today's defaults, or say nothing."""
    job = json.loads(parsed().to_json())
    del job["train"]["drop_last"], job["pipeline"]["vertical_sync"], job["train"]["optimizer"]["eps"]
    old = msgspec.structs.replace(manifest(parsed()), job=json.dumps(job), seen=None, run="", number=0)
    assert check(old, parsed(), [], CHAIN, BATCHES) == []
    assert calendar(Calendar(24, 8, 2, 0), old).since == Position(4, 1, 8, 0)


# -- the data's position ---------------------------------------------------------------------------------------------------


def seen(batches: Calendar, steps: range) -> list[list[int]]:
    """Sample numbers by epoch."""
    found: dict[int, list[int]] = {}
    for step in steps:
        found.setdefault(batches.epoch(step), []).extend(np.concatenate(batches.indices(step)).tolist())
    return [found[epoch] for epoch in sorted(found)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("stop", [1, 5, 6, 7, 9, 13])
def test_the_same_batch_size_goes_on_as_if_nothing_had_been(stop: int, drop_last: bool) -> None:
    straight = Calendar(103, 20, 3, 1, drop_last)
    at = straight.position(stop)
    resumed = calendar(straight, manifest(parsed("train.seed=1"), step=stop, epoch=at.epoch, seen=at.seen))
    for step in range(stop, 30):
        assert resumed.sizes(step) == straight.sizes(step)
        assert resumed.epoch(step) == straight.epoch(step)
        for ours, theirs in zip(resumed.indices(step), straight.indices(step), strict=True):
            assert np.array_equal(ours, theirs)
    assert resumed.end(9) == straight.end(9) == 9 * straight.steps_per_epoch
    assert resumed.every_size() == straight.every_size()
    jobs = parsed("train.evaluate_every=2", "train.epochs=9", text=JOB.replace("steps = 20", ""))
    a, b = course_of(jobs, straight, stop), course_of(jobs, resumed, stop)
    assert [a.evaluates(s) for s in range(stop, 60)] == [b.evaluates(s) for s in range(stop, 60)]


@pytest.mark.parametrize("size", [1, 7, 8, 16, 40, 64, 99])
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8, 11])
def test_another_batch_size_leaves_nothing_out_and_takes_nothing_twice(stop: int, size: int) -> None:
    before = Calendar(64, 16, 2, 1)
    at = before.position(stop)
    after = calendar(
        Calendar(64, size, min(2, size), 1), manifest(parsed("train.seed=1"), step=stop, epoch=at.epoch, seen=at.seen)
    )
    end = after.end(4)
    whole = [*seen(before, range(stop)), *seen(after, range(stop, end))]
    if at.seen:  # the epoch is in both
        whole[at.epoch : at.epoch + 2] = [whole[at.epoch] + whole[at.epoch + 1]]
    assert len(whole) == 4
    assert all(sorted(epoch) == list(range(64)) for epoch in whole)
    course = course_of(parsed("train.epochs=4", text=JOB.replace("steps = 20", "")), after, stop)
    assert course.last == end
    ends = [step for step in range(stop + 1, end + 1) if course.evaluates(step)]
    assert ends == [step for step in range(stop + 1, end + 1) if after.position(step).seen == 0]
    sizes = {n for step in range(stop, after.end(6)) for n in after.sizes(step)}
    assert sizes == after.every_size()


def test_a_change_of_a_change() -> None:
    """From 16 to 8 to 40 samples a step within one epoch."""
    first = Calendar(64, 16, 2, 1)
    second = calendar(Calendar(64, 8, 2, 1), manifest(parsed("train.seed=1"), step=2, epoch=0, seen=32))
    third = calendar(Calendar(64, 40, 2, 1), manifest(parsed("train.seed=1"), step=3, epoch=0, seen=40))
    assert second.position(3) == (3, 0, 40, 1)
    steps = [first.indices(0), first.indices(1), second.indices(2), third.indices(3)]
    assert sorted(np.concatenate([n for step in steps for n in step]).tolist()) == list(range(64))
    assert third.position(4) == (4, 1, 0, None)


def test_another_seed_begins_with_the_next_epoch() -> None:
    before = Calendar(64, 16, 2, 1)
    after = calendar(Calendar(64, 16, 2, 7), manifest(parsed("train.seed=1"), step=2, epoch=0, seen=32))
    whole = seen(before, range(2))[0] + seen(after, range(2, 4))[0]
    assert sorted(whole) == list(range(64))
    assert after.position(3).order == 1
    assert seen(after, range(4, 8)) == seen(Calendar(64, 16, 2, 7), range(4, 8))


@pytest.mark.parametrize("seen", [0, None])
def test_another_seed_begins_at_once_where_an_epoch_has_ended(seen: int | None) -> None:
    """The first epoch of a run that goes on had the order of the run before. ``seen`` is None in early checkpoints."""
    text = JOB.replace("batch_size = 8", "batch_size = 16")
    fields = {"step": 8, "epoch": 2, "seen": seen, "samples": 64}
    after = calendar(Calendar(64, 16, 2, 7), manifest(parsed("train.seed=1", text=text), **fields))
    for step in range(8, 16):
        assert np.array_equal(after.indices(step), Calendar(64, 16, 2, 7).indices(step))


def test_drop_last_drops_what_is_too_few() -> None:
    for seen_before, rest in ((0, 3), (20, 2), (48, 0)):
        since = manifest(parsed(), samples=64, step=9, epoch=3, seen=seen_before)
        batches = calendar(Calendar(64, 20, 2, 0, drop_last=True), since)
        assert batches.end(4) == 9 + rest
        assert batches.every_size() == {10}
        assert batches.position(9 + rest) == (9 + rest, 4, 0, None)


def test_drop_last_of_too_few_samples() -> None:
    with pytest.raises(
        UserError, match=r"leaves out the only batch: train.batch_size = 80, and the data set has 64 samples"
    ):
        course_of(parsed(), Calendar(64, 80, 2, 0, drop_last=True), 0)
    assert course_of(parsed(), Calendar(64, 80, 2, 0), 0).last == 20


def test_a_run_that_is_over() -> None:
    batches = calendar(BATCHES, manifest(parsed()))
    job = parsed("train.epochs=1", text=JOB.replace("steps = 20", ""))
    for over, last in ((job, 3), (parsed("train.steps=2"), 2), (parsed("train.steps=4"), 4)):
        assert course_of(over, batches, 4).last == 4
        with pytest.raises(UserError, match=f"is at step 4, and the job ends at step {last}"):
            check(manifest(parsed()), over, [], CHAIN, batches)


def test_layers_in_another_order_are_another_model() -> None:
    """As parts in the order of a set may be; what differs first is named."""
    names = [*CHAIN.names]
    names[1:3] = names[2:0:-1]
    before = manifest(parsed(), layers=names)
    with pytest.raises(UserError, match=rf"another model .*: layer 1 was {names[1]}, and is {names[2]} now$"):
        check(before, parsed(), (), CHAIN, calendar(BATCHES, before))
    longer = manifest(parsed(), layers=[*CHAIN.names, "more"])
    with pytest.raises(UserError, match=rf"another model .*: layer {len(CHAIN.names)} was more, and is none now$"):
        check(longer, parsed(), (), CHAIN, calendar(BATCHES, longer))


@pytest.mark.parametrize(
    ("before", "now", "key"),
    [
        ("train.mix={classes = 10, mixup = 0.2}", "train.mix=null", "train.mix = not given (was {"),
        ("train.clip_norm=1.0", "train.clip_norm=null", "train.clip_norm = not given (was 1.0)"),
        ("train.clip_norm=null", "train.clip_norm=1.0", "train.clip_norm = 1.0 (was not given)"),
        ('train.lora={targets = ["a"]}', 'train.lora={targets = ["b"], rank = 2}', 'train.lora = {"targets": ["b"], "rank"'),
        ('train.groups=[{names = ["a"], lr = 0.1}]', 'train.groups=[{names = ["b"]}]', 'train.groups = [{"names": ["b"], '),
        ("data.args.size='null'", "data.args.size='nil'", 'data.args.size = "nil" (was "null")'),
        ("data.args.size='nil'", "data.args.size='null'", 'data.args.size = "null" (was "nil")'),
    ],
)  # fmt: skip
def test_what_is_not_given_can_be_named(before: str, now: str, key: str) -> None:
    """Mixing, clipping or adapters may end where a run goes on."""
    with pytest.raises(UserError) as error:
        told(parsed(before), parsed(now))
    said = str(error.value)
    assert key in said
    (override,) = shlex.split(said.partition(", add --set ")[2])
    assert parsed(before, override) == parsed(now)
    assert told(parsed(before), parsed(now), override)[0].startswith(f"goes on with {key}")
