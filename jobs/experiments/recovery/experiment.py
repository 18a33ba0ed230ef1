"""A process is killed during a run. Measures the time until the next new step is done, by recovery inside the job and by the
baseline, which restarts the job from its last checkpoint. Job, lab and moment are the same; both are repeated several times.

All times (of the kill, and of the lines that the run prints) are seconds on one clock.
"""

import math
import os
import re
import signal
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from accept_mpi.device.fleet import read
from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.logs.format import KINDS, Rows
from accept_mpi.logs.reader import open_log
from edgelab.laboratory import Laboratory
from harness.experiment import run
from harness.live import SECONDS, Lines, anew, start, wait_for_step
from harness.store import table

_FOLDER = Path(__file__).resolve().parent
_JOB = parse((_FOLDER / "job.toml").read_text(), "job.toml")
_EVERY = _JOB.recovery.replicate_every
_OUT = Path("runs/experiments/recovery")
_PARTS = ("detect", "regroup", "plan", "try stages", "move state", "build", "replay, and the new step")
_KILL_AFTER, _VICTIM = (17, 22, 27), 2  # steps; host
_GROUP, _MEMBER = {"pipeline.cuts": "[21, 38]", "pipeline.ranks": "[[0, 1], 2, 3]", "recovery.replicate_every": '"auto"'}, 1
"""The same job with a stage held by two hosts, and the one of them that is killed; snapshots are minutes apart."""


def kill(lab: Laboratory, directory: Path, after: int, victim: int) -> float:
    """Kill the rank of host ``victim`` once the log has ``after`` steps; returns the time (``time.monotonic``)."""
    wait_for_step(directory, after)
    for pid in lab.processes(lab.hosts[victim].name):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"accept_mpi" in words and b"python" in words[0]:
            os.kill(pid, signal.SIGKILL)
            return time.monotonic()
    raise UserError("the victim's process was not found")


def inside(lab: Laboratory, directory: Path, after: int, victim: int = _VICTIM, *more: str) -> dict[str, Any]:
    """Measure recovery inside the job: seconds until the new plan is ready, until the next step and the next new one, and
    the rate afterwards. ``more``: arguments of the job."""
    with start(lab, _FOLDER / "job.toml", directory, *more, ulfm=True) as running:
        lines = Lines(running.process)
        killed = kill(lab, directory, after, victim)
        noticed = lines.wait(lambda line: "lost rank" in line)
        told = lines.text.splitlines()[-1]
        wait_for_step(directory, after + 30)
    with open_log(directory / "log.h5") as log:
        steps, events, trace = log["steps"][:], log["events"][:], log["trace"][:]
    begins = int(re.search(r"go(?:es)? on from step (\d+)", told)[1])  # type: ignore[index]
    lost = next(float(event["time"]) for event in events if b"lost rank" in event["text"])
    made = int(steps["step"][steps["end"] < lost].max())
    again = trace[(trace["kind"] == KINDS.index("U")) & (trace["step"] == begins + 1) & (trace["start"] > lost)]
    began = noticed - lost  # the start of the run's clock
    rest = steps[steps["step"] > made + 5]
    before = np.diff(steps["end"][steps["end"] < lost])[2:]
    return {
        "usual": float(np.median(before)),
        "ready": noticed - killed,
        "first": began + float(again["end"].max()) - killed,
        "step": began + end_of(steps, made + 1) - killed,
        "replayed": made - begins,
        "rate": float(rest["samples"][1:].sum() / (rest["end"][-1] - rest["end"][0])),
        "told": told,
    }


def end_of(steps: Rows, step: int) -> float:
    """Second at which a step was done, on its run's clock."""
    return float(steps["end"][steps["step"] == step][0])


def restarted(lab: Laboratory, directory: Path, after: int, victim: int = _VICTIM, *more: str) -> dict[str, Any]:
    """Measure the baseline: the job ends and is restarted from its checkpoint on all hosts, with the same plan."""
    with start(lab, _FOLDER / "job.toml", directory, *more, ulfm=False) as running:
        Lines(running.process)
        killed = kill(lab, directory, after, victim)
        running.process.wait(SECONDS)
        ended = time.monotonic()
    with open_log(directory / "log.h5") as log:
        last = int(log["steps"]["step"][-1])
    with start(lab, _FOLDER / "job.toml", directory, "--resume", str(directory), *more, ulfm=False) as running:
        lines = Lines(running.process)
        resumed = lines.wait(lambda line: "resumed from" in line)
        wait_for_step(directory, last + 1)
    with open_log(directory / "log.h5") as log:
        steps, events = log["steps"][:], log["events"][:]
    event = next(event for event in reversed(events) if b"resumed from" in event["text"])
    began = resumed - float(event["time"])
    first, step = (began + end_of(steps, number) - killed for number in (int(event["step"]) + 1, last + 1))
    return {"ready": ended - killed, "first": first, "step": step}


def cost(lab: Laboratory, often: float) -> str:
    """A sentence on the cost of snapshots in a run without losses: the seconds of one, and how often "auto" makes them.

    ``often``: seconds per step with the job's own ``replicate_every``.
    """
    extra = []
    with start(lab, _FOLDER / "job.toml", anew(_OUT / "snapshots"), *_every(20), ulfm=True, drain=True):
        wait_for_step(_OUT / "snapshots", 135)
    steps, snapshots = _with_snapshots(_OUT / "snapshots")
    seconds = np.diff(steps["end"])
    usual = float(np.median(seconds))
    for step in snapshots[1:]:
        at = int(np.searchsorted(steps["step"], step))  # copied after this step, so the following ones are slower
        if at + 4 < len(seconds):
            extra.append(float((seconds[at : at + 4] - usual).sum()))
    with start(lab, _FOLDER / "job.toml", anew(_OUT / "auto"), *_every('"auto"'), ulfm=True, drain=True):
        wait_for_step(_OUT / "auto", 300)
    steps, snapshots = _with_snapshots(_OUT / "auto")
    moments = steps["end"][np.searchsorted(steps["step"], snapshots)]
    period = float(np.diff(moments)[-1]) if len(moments) > 1 else float(steps["end"][-1] - moments[-1])
    one, error = statistics.fmean(extra), statistics.stdev(extra) / math.sqrt(len(extra))
    return (
        f"\nA snapshot makes the steps beside it {one:.2f} s longer (mean of {len(extra)}, standard error {error:.2f}; a "
        f'step takes {usual:.2f} s); "auto" makes one every {period:.0f} s, '
        f"{100 * max(one, 0.0) / period:.1f} % of the time. "
        f"Where a loss is to cost {_EVERY} steps at most, a step takes {often:.2f} s.\n"
    )


def _every(steps: object) -> list[str]:
    return ["--set", f"recovery.replicate_every={steps}", "--set", "output.checkpoint_every=0"]


def _with_snapshots(directory: Path) -> tuple[Rows, list[int]]:
    """The rows of steps, and the numbers of the steps after which the first stage took a snapshot."""
    with open_log(directory / "log.h5") as log:
        steps, trace = log["steps"][:], log["trace"][:]
    rows = trace[(trace["kind"] == KINDS.index("snapshot")) & (trace["stage"] == 0)]
    return steps, [int(step) for step in rows["step"] if step <= steps["step"][-1]]


def alone(lab: Laboratory, directory: Path, last: int) -> float:
    """samples/s of a job that these hosts start and that runs undisturbed, with its snapshots, until step ``last``."""
    with start(lab, _FOLDER / "job.toml", directory, "--set", f"train.steps={last}", ulfm=True) as running:
        running.process.communicate(timeout=SECONDS)
    with open_log(directory / "log.h5") as log:
        steps = log["steps"][:]
    after = steps[steps["step"] > last // 4]
    return float(after["samples"][1:].sum() / (after["end"][-1] - after["end"][0]))


def parts(found: dict[str, Any]) -> list[float]:
    """Seconds of a recovery's parts, in the order of ``_PARTS``."""
    numbers = re.search(
        r"regrouped in (\d+) ms, planned (\d+) ms later, tried stages (\d+) ms later, "
        r"had their layers' state (\d+) ms later, could begin (\d+) ms",
        found["told"],
    )
    assert numbers
    regrouped, *later = (int(number) / 1e3 for number in numbers.groups())
    between = [end - start for start, end in pairwise([0, *later])]
    return [found["ready"] - regrouped - later[-1], regrouped, *between, found["step"] - found["ready"]]


def both(lab: Laboratory, what: str, victim: int, *more: str) -> list[list[dict[str, Any]]]:
    """Recovery inside the job and the restart, each at all moments, in turn."""
    ours, theirs = [], []
    for trial, after in enumerate(_KILL_AFTER):
        ours.append(inside(lab, anew(_OUT / f"{what}-{trial}"), after, victim, *more))
        print(f"recovered: {ours[-1]}", flush=True)
        theirs.append(restarted(lab, anew(_OUT / f"{what}-restarted-{trial}"), after, victim, *more))
        print(f"restarted: {theirs[-1]}", flush=True)
    return [ours, theirs]


def main() -> None:
    _OUT.mkdir(parents=True, exist_ok=True)
    hosts = read(_FOLDER / "fleet.toml")
    with Laboratory("experiment-recovery").using(hosts) as lab:
        alone(lab, anew(_OUT / "first"), 4)  # puts the hosts into the latency database
        ours, theirs = both(lab, "inside", _VICTIM, "--set", "pipeline.groups=false")
        group = both(lab, "group", _MEMBER, *(part for key, value in _GROUP.items() for part in ("--set", f"{key}={value}")))
        replication = cost(lab, statistics.median(one["usual"] for one in ours))
        print(replication, flush=True)
    with Laboratory("experiment-recovery").using([host for n, host in enumerate(hosts) if n != _VICTIM]) as lab:
        survivors = alone(lab, anew(_OUT / "survivors"), 30)
    rate = statistics.median(one["rate"] for one in ours)
    text = [
        "# A process of one of four hosts is killed (0.4 core, 100 Mbit/s, MobileNetV2, "
        f"batch {_JOB.train.batch_size}, {_JOB.pipeline.schedule}, 4 bits)\n",
        *compared(ours, theirs),
        f"(A snapshot every {_EVERY} steps.) "
        f"After the loss {rate:.1f} samples/s; a job that the three begin by themselves {survivors:.1f} "
        f"({rate / survivors:.2f}).\n",
        replication,
        "# The same, one of two hosts that hold the first stage together; snapshots as rare as by default\n",
        *compared(*group),
        f"A step takes {statistics.median(one['usual'] for one in group[0]):.2f} s before the loss.\n",
    ]
    (_OUT / "table.md").write_text("\n".join(text))
    print("\n".join(text))
    draw(_OUT / "inside-0" / "log.h5")


def compared(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """The table of recoveries and restarts, with what the runs said."""
    rows: list[list[object]] = []
    for name, found in (("recovery in the job (ULFM, replicas)", ours), ("stop, start again from the checkpoint", theirs)):
        each = [statistics.median(one[key] for one in found) for key in ("ready", "first", "step")]
        rows.append([name, *(f"{seconds:.2f}" for seconds in each), f"{max(one['step'] for one in found):.2f}"])
    first, ratio = (
        statistics.median(one[key] for one in theirs) / statistics.median(one[key] for one in ours)
        for key in ("first", "step")
    )
    head = [
        "seconds from the kill, median of three",
        "new plan ready; or job ended",
        "next step done",
        "next new step done",
        "slowest",
    ]
    return [
        table(head, rows),
        "",
        table(["of it, seconds", *_PARTS], [[trial, *parts(one)] for trial, one in enumerate(ours)]),
        f"\nRecovery is {first:.1f} x as fast as the restart to the next step, {ratio:.1f} x to the next new one. "
        f"Steps made once more: {', '.join(str(one['replayed']) for one in ours)}.\n",
        "What the runs said:\n",
        *(f"    {one['told']}" for one in ours),
        "",
    ]


def draw(log: Path) -> None:
    """Plot the course of our first run, as a report does."""
    from accept_mpi.logs.figures import draw_course

    with open_log(log) as file:
        trace, steps, events = file["trace"][:], file["steps"][:], file["events"][:]
    losses = events[np.array([event["text"].startswith(b"lost ") for event in events])]
    draw_course(_OUT / "plot.png", trace, steps, losses, {})


run(main)
