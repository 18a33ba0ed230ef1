"""Resumes from a checkpoint: which changes of the job are allowed, and where in the data the run goes on.

A change to the meaning of a run is refused, in one sentence, unless the command line names it (``--set``); then it is
reported. Where layers are, how data is sent and how long the run is may change silently.
"""

import contextlib
import json
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from accept_mpi.comm.runtime import Runtime
from accept_mpi.data.calendar import Calendar, Milestones, Position
from accept_mpi.errors import Agreed, UserError, shown
from accept_mpi.files.values import loads
from accept_mpi.job import GOES_WITH, Job, Optimizer, flows
from accept_mpi.models import Chain
from accept_mpi.pipeline.optimizer import left_behind
from accept_mpi.planning.micro_batches import settled
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.recovery.manifest import Manifest
from accept_mpi.training.lineage import unevaluated

_OWN_DATA = "data.name"
"""The key of the data set, which must not change, since the checkpoint's position is in the order of its samples."""
_PLAIN = (
    "model.name", "model.output", "train.batch_size", "train.micro_batches", "train.loss", "train.seed", "train.drop_last",
    "train.freeze", "train.unfreeze", "train.lora", "train.groups", "train.clip_norm", "train.label_smoothing",
    "train.class_weights", "train.mix", "train.ema", "train.precision",
)  # fmt: skip
_TABLES = ("model.args", "data.args")
_ABSENT = object()
_NULL = "null"  # what takes a key out (``job_file.parse``)


class Change(NamedTuple):
    """A key whose value in the job differs from that in the checkpoint's job."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} = {_text(self.new)} (was {_text(self.old)})"


def share_manifest(runtime: Runtime, checkpoint: Checkpoint | None) -> Manifest | None:
    """Share rank 0's manifest with all ranks, which call this together; None without a checkpoint."""
    mine = msgspec.to_builtins(checkpoint.manifest) if checkpoint else None
    shared = runtime.messenger.broadcast(mine, runtime.startup_seconds, "the checkpoint's manifest")
    return msgspec.convert(shared, Manifest) if shared else None


def lacks_evaluation(runtime: Runtime, directory: Path, manifest: Manifest) -> bool:
    """True if the log in the run's directory lacks an evaluation after the checkpoint with which a run begins. All ranks
    call this together, and have rank 0's answer."""
    mine = runtime.rank == 0 and unevaluated(directory / "log.h5", manifest.run, manifest.step)
    return bool(runtime.messenger.broadcast(mine, runtime.startup_seconds, "whether an evaluation is missing"))


def calendar(batches: Calendar, manifest: Manifest | None) -> Calendar:
    """The calendar of a run that goes on from a checkpoint: it begins with the first sample not used yet. ``batches``: the
    calendar of the same run from its beginning, returned as it is without a checkpoint."""
    if manifest is None:
        return batches
    if manifest.seen is not None:
        at = Position(manifest.step, manifest.epoch, manifest.seen)
    else:
        size, drop_last = (_get(manifest.settings(), f"train.{key}") for key in ("batch_size", "drop_last"))
        known = type(size) is int and size > 0
        before = replace(batches, batch_size=size if known else batches.batch_size, drop_last=drop_last is True)
        at = before.position(manifest.step)
    if at.seen:  # else the epoch to come has the order of this run
        at = at._replace(order=manifest.seed if manifest.order is None else manifest.order)
    return replace(batches, since=at)


def with_its_micro_batches(job: Job, manifest: Manifest) -> Job:
    """The job with the checkpoint's number of micro-batches, if it leaves that open."""
    count = _get(manifest.settings(), "train.micro_batches")
    return settled(job, count) if job.train.micro_batches == "auto" and type(count) is int and count > 0 else job


_MOST_STEPS = (1 << 63) - 1  # the largest number that a log holds


def course_of(job: Job, batches: Calendar, first: int, again: bool = False, unevaluated: bool = False) -> Milestones:
    """The steps of a run that goes on after ``first`` steps, and its pauses (``again`` as in ``Milestones``; or, if an
    evaluation is due then, ``unevaluated``). Raises Agreed if there are too many steps, or no full batch."""
    train, output = job.train, job.output
    last = max(_end_of(job, batches), first)
    if last > _MOST_STEPS:
        raise Agreed(f"train.{'epochs' if train.steps is None else 'steps'}: {last} steps; at most {_MOST_STEPS}")
    if batches.drop_last and batches.samples < batches.batch_size:
        raise Agreed(
            f"train.drop_last leaves out the only batch: train.batch_size = {batches.batch_size}, and the data set has "
            f"{batches.samples} samples"
        )
    course = Milestones(
        first, last, train.evaluate_every * batches.steps_per_epoch, output.checkpoint_every,
        checkpoint_at_end=output.checkpoint_at_end, evaluate_from=batches.end(0, whole=False),
        checkpoint_evaluated=bool(output.keep_best), again=again,
    )  # fmt: skip
    return replace(course, again=again or (unevaluated and course.evaluates(first)))


def _end_of(job: Job, batches: Calendar) -> int:
    """The job's last step, which may lie before the beginning of the calendar."""
    steps = job.train.steps
    return steps if steps is not None else batches.end(job.train.epochs or 1, whole=False)


def check(
    manifest: Manifest,
    job: Job,
    overrides: Sequence[str],
    chain: Chain,
    batches: Calendar,
    classes: Sequence[str] = (),
) -> list[str]:
    """Check that the job may resume from a checkpoint; returns lines for the log on what has changed.

    ``overrides``: the command line's changes; ``batches``: the run's ``calendar``; ``classes``: names of the data set's.
    Raises UserError if the checkpoint belongs to another model, other data or another job, or is already at the last step.
    """
    if manifest.layers != chain.names:
        pairs = enumerate(zip_longest(manifest.layers, chain.names, fillvalue="none"))
        n, (old, new) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        raise UserError(
            f"--resume: the checkpoint holds another model ({shown(manifest.model)}, {len(manifest.layers)} layers) "
            f"than the job names ({job.model.name}, {len(chain)} layers): layer {n} was {shown(old)}, and is {new} now"
        )
    if manifest.samples != batches.samples:
        raise UserError(
            f"--resume: the checkpoint was trained on {manifest.samples} samples, the job's data has {batches.samples}"
        )
    for n, (old, new) in enumerate(zip_longest(manifest.classes, classes, fillvalue="none")):
        if manifest.classes and old != new:
            raise UserError(f"--resume: class {n} was {shown(old)} in training, and is {shown(new)} in the job's data now")
    if manifest.step >= (last := _end_of(job, batches)):
        raise UserError(f"--resume: the checkpoint is at step {manifest.step}, and the job ends at step {last}")
    found = list(changes(manifest, job))
    if own := [change for change in found if change.key == _OWN_DATA]:
        raise UserError(f"--resume: {own[0]}: a checkpoint goes on with the data that it was trained on")
    named = [override.partition("=")[0].strip() for override in overrides]
    if unnamed := [change for change in found if not _is_named(change.key, named)]:
        hints = dict.fromkeys(_hint(change, job) for change in unnamed)
        raise UserError(
            f"--resume: the job is not the checkpoint's: {', '.join(map(str, unnamed))}; "
            f"where that is meant, add {' '.join(hints)}"
        )
    told = [f"goes on with {change}" for change in found]
    before = _get(manifest.settings(), "train.optimizer")
    with contextlib.suppress(msgspec.ValidationError):
        told += _left_behind(msgspec.convert(before, Optimizer), job.train.optimizer)
    return told


def _left_behind(before: Optimizer, now: Optimizer) -> list[str]:
    """A line on state of the optimizer that the run does not go on from, if there is any."""
    of_matrices, of_others = left_behind(before, now)
    if of_matrices and of_others:
        return ["the optimizer starts from nothing: its state was of another kind"]
    if of_matrices or of_others:
        which = "weight matrices" if of_matrices else "all but weight matrices"
        return [f"the optimizer starts from nothing for {which}: their state was of another kind"]
    return []


def changes(manifest: Manifest, job: Job) -> Iterator[Change]:
    """Yield the changes that alter the meaning of a run, key by key."""
    before, now = manifest.settings(), json.loads(job.to_json())
    before = {"model": {"name": manifest.model, "args": manifest.model_args}} | before
    keys = [_OWN_DATA, *_PLAIN]
    for table in _TABLES:
        both = [_get(tree, table) for tree in (before, now)]
        if all(isinstance(one, dict) for one in both):
            keys += [f"{table}.{key}" for key in dict.fromkeys([*both[1], *both[0]])]
    for key in keys:
        yield from _compared(key, _get(before, key), _get(now, key), missing=key.startswith(_TABLES))
    yield from _compared("train.lr", _lr(before), job.lr)
    yield from _optimizer_changes(_get(before, "train.optimizer"), _get(now, "train.optimizer"))
    schedules = [_get(tree, "pipeline.schedule") for tree in (before, now)]
    if schedules[0] is not _ABSENT and schedules[0] != schedules[1] and any(map(flows, schedules)):
        yield Change("pipeline.schedule", *schedules)  # all other schedules compute the same
    yield from _compared("pipeline.vertical_sync", *(_get(tree, "pipeline.vertical_sync") for tree in (before, now)))


def _optimizer_changes(before: Any, now: Any) -> Iterator[Change]:
    """Yield only changes that both optimizers heed: a momentum that Adam does not use has not changed."""
    if not isinstance(before, dict):
        return
    for key, new in now.items():
        by, choices = GOES_WITH.get(key, ("name", (now["name"],)))
        heeded = key not in GOES_WITH or all(tree.get(by) in choices for tree in (before, now))
        if key != "lr" and heeded:
            yield from _compared(f"train.optimizer.{key}", before.get(key, _ABSENT), new)


def _compared(key: str, old: Any, new: Any, missing: bool = False) -> Iterator[Change]:
    """Yield the change of a key, if it is one. ``missing``: a key that only one of the jobs has counts as changed."""
    if old != new and (missing or (old is not _ABSENT and new is not _ABSENT)):
        yield Change(key, old, new)


def _lr(job: dict[str, Any]) -> Any:
    """Learning rate of a job: ``train.lr`` if given, else ``train.optimizer.lr``."""
    short = _get(job, "train.lr")
    return _get(job, "train.optimizer.lr") if short is None or short is _ABSENT else short


def _get(tree: Any, path: str) -> Any:
    """The value at a dotted path in nested dicts; ``_ABSENT`` if there is none."""
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return _ABSENT
        tree = tree[key]
    return tree


def _is_named(key: str, named: Sequence[str]) -> bool:
    """True if the command line names a key, or a table that holds it."""
    keys = (key, "train.optimizer.lr") if key == "train.lr" else (key,)
    return any(one == path or one.startswith(f"{path}.") for one in keys for path in named)


def _hint(change: Change, job: Job) -> str:
    """The option that names a change on the command line."""
    key, value = change.key, change.new
    if value is _ABSENT:
        key = key.rpartition(".")[0]
        value = job.model.args if key == "model.args" else job.data.args
    return f"--set {shlex.quote(f'{key}={value if _is_bare(value) else _toml(_given(value))}')}"


def _given(value: Any) -> Any:
    """A value without the keys in it that are not given."""
    if isinstance(value, dict):
        return {key: _given(inner) for key, inner in value.items() if inner is not None}
    return list(map(_given, value)) if isinstance(value, list) else value


def _is_bare(value: Any) -> bool:
    """True for a text that is read as one without quotes, too: as no number, date or the like."""
    if not isinstance(value, str) or value != value.strip() or value == _NULL:
        return False
    try:
        loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return True
    except ValueError:
        pass
    return False


def _toml(value: Any) -> str:
    if value is None:
        return _NULL
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return "not given" if value is _ABSENT or value is None else shown(json.dumps(_given(value), ensure_ascii=False))
