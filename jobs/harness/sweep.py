"""Runs a sweep: one job file with many overrides, one after another; finished runs are not repeated.

    job = "cnn.toml"                    # in the folder of the sweep's file
    ranks = 4
    output = "runs/quality/cnn"         # results.h5, table.md, plot.png, and a directory for each run
    metric = "accuracy"                 # of the last evaluation; or its "loss"; or "samples_per_s" (median of steps)
    repeat = "seed"                     # an axis to average over; optional
    [axes.codec]                        # axes multiply; lists within an axis go together
    "pipeline.forward"  = ["none", "uniform:4", "mbq:4"]
    "pipeline.backward" = ["none", "uniform:4", "uniform:4"]
    label = ["uncoded", "forward", "4 bits"]    # names of the places, if their values are not; optional
    [axes.seed]
    "train.seed" = [0, 1, 2]

Usage: ``python -m harness.sweep SWEEP.toml [-- MPIRUN FLAGS]``; jobs/sweep.sh installs what it needs and calls this.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from accept_mpi.errors import UserError
from accept_mpi.files.values import check_values, loads
from accept_mpi.job import Count, Job
from accept_mpi.job_file import parse, read_text
from accept_mpi.launch import mpirun
from accept_mpi.launch.host_file import read_hosts
from accept_mpi.logs.figures import pyplot
from accept_mpi.logs.reader import open_log, read_facts
from harness.store import Store, table

METRICS = {"accuracy": "test accuracy, %", "loss": "test loss", "samples_per_s": "samples/s"}
_PERCENT = 100
_LABEL = "label"
_END_SECONDS = 30.0


class Sweep(msgspec.Struct, forbid_unknown_fields=True):
    """Content of a sweep's file; see the module's docstring."""

    job: str
    output: str
    axes: dict[str, dict[str, list[Any]]]
    ranks: Count = 4
    metric: str = "accuracy"
    repeat: str | None = None
    title: str | None = None


def read(path: Path) -> Sweep:
    """Read a sweep's file. Raises UserError if it is not valid."""
    try:
        content = loads(read_text(path, "sweep"))
        check_values(content, str(path))
        sweep = msgspec.convert(content, Sweep)
    except ValueError as error:  # of msgspec, too
        raise UserError(f"{path}: {error}") from error
    if sweep.metric not in METRICS:
        raise UserError(f'{path}: metric = "{sweep.metric}": expected one of {", ".join(METRICS)}')
    for name, keys in sweep.axes.items():
        if not keys or len({len(values) for values in keys.values()}) != 1 or not all(keys.values()):
            raise UserError(f"{path}: axes.{name}: expected keys with lists of one length")
        places = [label(dict(zip(keys, values, strict=True))) for values in zip(*keys.values(), strict=True)]
        if twice := next((place for place in places if places.count(place) > 1), None):
            raise UserError(f"{path}: axes.{name}: two places are called {twice}; give each a label of its own")
    if sweep.repeat is not None and sweep.repeat not in sweep.axes:
        raise UserError(f'{path}: repeat = "{sweep.repeat}" is none of the axes {", ".join(sweep.axes)}')
    return sweep


def points(sweep: Sweep) -> list[dict[str, dict[str, Any]]]:
    """All combinations, as overrides by axis. The repeated axis changes slowest, so that a first table is complete early."""
    names = sorted(sweep.axes, key=lambda name: name != sweep.repeat)
    columns = [
        [dict(zip(sweep.axes[name], values, strict=True)) for values in zip(*sweep.axes[name].values(), strict=True)]
        for name in names
    ]
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*columns)]


def label(overrides: dict[str, Any]) -> str:
    """Label of one place on an axis: its own, or its overrides' values."""
    return str(overrides.get(_LABEL, "")) or " / ".join(str(value) for value in overrides.values())


def run(path: Path, flags: list[str]) -> int:
    """Run the points without results, then write table and plot; returns the number of points that failed."""
    sweep, failed = read(path), 0
    out = Path(sweep.output)
    everything, rows = points(sweep), []
    folders = _folders(sweep, everything)
    overrides = [_settings(point, where) for point, where in zip(everything, folders, strict=True)]
    text = read_text(path.parent / sweep.job)
    jobs = [parse(text, sweep.job, settings) for settings in overrides]  # all, before the first run
    store = Store(out / "results.h5")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: output: cannot write to {out}: {error.strerror}") from error
    flags = as_launch(flags, out)
    for number, (point, where, settings, job) in enumerate(zip(everything, folders, overrides, jobs, strict=True), 1):
        known = {"job": _identity(job), "ranks": sweep.ranks} | point
        found = store.get(known) or result(where / "log.h5", job, sweep.ranks)
        if found is None:
            print(f"{number}/{len(everything)}: {where}", flush=True)
            found = _train(sweep, path.parent / sweep.job, settings, flags, where / "log.h5", job)
        if found is None:
            failed += 1
            continue
        if store.get(known) is None:
            store.add(known, found)
        rows.append(point | found)
    if rows:
        (out / "table.md").write_text(shown := summary(sweep, rows))
        draw(sweep, rows, out / "plot.png")
        print(f"{shown}\n{out / 'results.h5'}, {out / 'table.md'}, {out / 'plot.png'}")
    return failed


def _folders(sweep: Sweep, everything: list[dict[str, dict[str, Any]]]) -> list[Path]:
    """A folder for each point's run, called as its labels; where these differ in punctuation alone, with a number."""
    names: list[str] = []
    for point in everything:
        plain = re.sub(r"[^\w.]+", "-", "-".join(label(point[name]) for name in sweep.axes))
        same = (plain if n == 1 else f"{plain}-{n}" for n in itertools.count(1))
        names.append(next(name for name in same if name not in names))
    return [Path(sweep.output) / name for name in names]


def _settings(point: dict[str, dict[str, Any]], where: Path) -> list[str]:
    """Overrides of the job file for a point whose run writes to ``where``."""
    changed = {key: value for overrides in point.values() for key, value in overrides.items() if key != _LABEL}
    return [f"{key}={_toml(value)}" for key, value in (changed | {"output.directory": str(where)}).items()]


def _train(sweep: Sweep, path: Path, settings: list[str], flags: list[str], log: Path, job: Job) -> dict[str, Any] | None:
    """Run one point; returns its result, or None if it failed, with the reason on standard error."""
    words = [
        mpirun.path(),
        "-n",
        str(sweep.ranks),
        *flags,
        sys.executable,
        "-m",
        "accept_mpi",
        "train",
        "--quiet",
        str(path),
    ]
    words += [word for setting in settings for word in ("--set", setting)]
    with subprocess.Popen(
        words, env=mpirun.ENVIRONMENT | os.environ,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as running:  # fmt: skip
        try:
            said, _ = running.communicate()
        except BaseException:  # Ctrl-C, SIGTERM: a killed mpirun would leave its ranks behind
            running.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.communicate(timeout=_END_SECONDS)
            running.kill()
            raise
    found = result(log, job, sweep.ranks) if running.returncode == 0 else None
    if found is None:
        print(f"failed: {shlex.join(words)}\n{said}", file=sys.stderr, flush=True)
    return found


def result(log: Path, job: Job, ranks: int) -> dict[str, Any] | None:
    """The result in the log of a finished run of exactly this job (except for its output) on ``ranks`` ranks; else None."""
    try:
        with open_log(log) as file:
            finished = any(text.startswith(b"done") for text in file["events"]["text"])
            made_by = Job.from_json(file.attrs["job"])
            facts = read_facts(file)
            if not finished or _identity(made_by) != _identity(job) or len(facts["hosts"]) != ranks:
                return None
            cuts = [stage["start"] for stage in facts["plan"]["stages"][1:]]
            steps, evals = file["steps"][:], file["evals"][:]
    except UserError:
        return None
    last = evals[-1] if len(evals) else None
    return {
        "plan_cuts": str(cuts),
        "samples_per_s": float(np.median(steps["samples_per_s"][1:])) if len(steps) > 1 else math.nan,
        "train_loss": float(steps["loss"][-1]),
        "loss": float(last["loss"]) if last is not None else math.nan,
        "accuracy": _PERCENT * float(last["accuracy"]) if last is not None else math.nan,
    }


def _identity(job: Job) -> str:
    """Text of the settings that determine a run's result: all but those of its output."""
    content = json.loads(job.to_json())
    del content["output"]
    return json.dumps(content, sort_keys=True)


def _toml(value: Any, within: bool = False) -> str:
    """A value as ``--set`` takes it; ``within`` a table, where text has quotes."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(one, True)}" for key, one in value.items()) + " }"
    return json.dumps(value) if within or isinstance(value, list | bool) else str(value)


def as_launch(flags: list[str], folder: Path) -> list[str]:
    """The flags with a copy of the host file (in ``folder``) that mpirun reads as ``launch`` would.

    For a line without slots, ``launch`` starts one rank, but mpirun one per core. Raises UserError.
    """
    found = list(flags)
    for place, flag in enumerate(flags[:-1]):
        if flag.lstrip("-") in ("hostfile", "machinefile"):
            copy = folder / "hosts"
            copy.write_text("".join(f"{host.line}\n" for host in read_hosts(Path(flags[place + 1]))))
            found[place + 1] = str(copy)
    return found


def groups(sweep: Sweep, rows: list[dict[str, Any]]) -> list[tuple[tuple[str, ...], list[float]]]:
    """The metric's values for each combination of labels of all axes but the repeated one, in the sweep's order."""
    axes = [name for name in sweep.axes if name != sweep.repeat]
    found: dict[tuple[str, ...], list[float]] = {}
    for point in points(sweep):
        found.setdefault(tuple(label(point[name]) for name in axes), [])
    for row in rows:
        found[tuple(label(row[name]) for name in axes)].append(float(row[sweep.metric]))
    return [(names, values) for names, values in found.items() if values]


def summary(sweep: Sweep, rows: list[dict[str, Any]]) -> str:
    """A Markdown table of means, the spread of single runs, differences from the first row and their standard errors."""
    axes = [name for name in sweep.axes if name != sweep.repeat]
    grouped = groups(sweep, rows)
    base, first = statistics.fmean(grouped[0][1]), _error(grouped[0][1])
    digits = 4 if sweep.metric == "loss" else 2
    lines: list[list[object]] = []
    for names, values in grouped:
        mean, spread, unsure = statistics.fmean(values), _spread(values), math.hypot(first, _error(values))
        change = f"{mean - base:+.2f} ± {unsure:.2f}"
        if sweep.metric != "accuracy":
            change = f"{100 * (mean / base - 1):+.2f} % ± {100 * unsure / base:.2f}"
        lines.append([*names, f"{mean:.{digits}f}", f"{spread:.{digits}f}", change if lines else "", len(values)])
    return table([*axes, METRICS[sweep.metric], "± one run", "against the first, ± standard error", "runs"], lines)


def _spread(values: list[float]) -> float:
    """Standard deviation of single runs; 0 for one run."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _error(values: list[float]) -> float:
    """Standard error of the mean."""
    return _spread(values) / math.sqrt(len(values))


def draw(sweep: Sweep, rows: list[dict[str, Any]], path: Path) -> None:
    """Plot every run as a dot and every mean as a bar."""
    plt, grouped = pyplot(), groups(sweep, rows)
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.35 * len(grouped)), layout="constrained")
    for y, (_, values) in enumerate(grouped):
        axes.plot(values, [y] * len(values), "o", color="#56B4E9", markersize=5, alpha=0.8)
        axes.plot([statistics.fmean(values)] * 2, [y - 0.3, y + 0.3], color="#D55E00", linewidth=2.5)
    axes.axvline(statistics.fmean(grouped[0][1]), color="#999999", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(grouped)), [", ".join(names) for names, _ in grouped])
    axes.invert_yaxis()
    axes.set_xlabel(METRICS[sweep.metric])
    axes.set_title(sweep.title or path.parent.name, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(prog="sweep", description="Run a job file with many overrides, one after another.")
    parser.add_argument("sweep", type=Path, metavar="SWEEP.toml")
    parser.add_argument("flags", nargs="*", metavar="-- MPIRUN FLAGS", help="e.g. -- -hostfile edges")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        return 1 if run(options.sweep, options.flags) else 0
    except UserError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
