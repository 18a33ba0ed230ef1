"""A host loses its cable or its power during a run. Measures the time until ``launch`` has the others make new steps, the
number of repeated steps, and the time until the host is used again after its return. There are no checkpoints: the snapshots
are on the others' disks.
"""

import re
import signal
import sys
from pathlib import Path
from typing import Any

from accept_mpi.device.fleet import read
from accept_mpi.logs.figures import pyplot
from edgelab.laboratory import Laboratory
from harness.experiment import run
from harness.live import Lines, anew, begin, step_of, wait_for_step
from harness.store import table

_FOLDER = Path(__file__).resolve().parent
_OUT = Path("runs/experiments/lost_host")
_AT, _HOST = 25, 2  # step; host
_LOSSES = {"cut": "its cable is pulled", "kill": "its power is off"}
_HEAD = [
    "the host", "noticed", "others started", "first new step", "steps made once more", "after its return: noticed",
    "first step with it",
]  # fmt: skip


def lose(lab: Laboratory, loss: str) -> list[object]:
    """Run the experiment for one kind of loss; returns a row of the table: seconds since the loss, repeated steps, seconds
    since the host's return."""
    directory, name = anew(_OUT / loss), lab.hosts[_HOST].name
    job = ["--set", f"output.directory={directory.resolve()}"]
    command = [sys.executable, "-m", "accept_mpi", "launch", "-hostfile", lab.hostfile, _FOLDER / "job.toml", *job]
    with begin(lab, command) as running:
        lines = Lines(running.process)
        made = wait_for_step(directory, _AT)
        lost = lines.now()
        getattr(lab, loss)(name)
        noticed = lines.wait(lambda line: "no answer from" in line or "before the job was done" in line) - lost
        started = lines.wait(lambda line: "starting 3 ranks without" in line) - lost
        lines.wait(lambda line: "resumed from" in line)
        resumed = int(re.search(r"step (\d+)  resumed", lines.text)[1])  # type: ignore[index]
        last = made if made > resumed else resumed
        first = lines.wait(lambda line: step_of(line) > last) - lost
        returned = lines.now()
        lab.mend(name)
        back = lines.wait(lambda line: "answers again" in line) - returned
        lines.wait(lambda line: "resumed from" in line)
        used = lines.wait(lambda line: step_of(line) > 0) - returned
        running.process.send_signal(signal.SIGTERM)
        lines.wait(lambda line: "go on with --resume" in line)
    print(f"{loss}: {noticed:.1f} {started:.1f} {first:.1f}, {made} -> {resumed}, {back:.1f} {used:.1f}", flush=True)
    return [_LOSSES[loss], noticed, started, first, last - resumed, back, used]


def main() -> None:
    _OUT.mkdir(parents=True, exist_ok=True)
    rows: list[Any] = []
    for loss in _LOSSES:
        with Laboratory("experiment-lost-host").using(read(_FOLDER / "fleet.toml")) as lab:
            rows.append(lose(lab, loss))
    text = "\n".join([
        "# One of four hosts is lost (0.4 core each, 100 Mbit/s, MobileNetV2, batch 32, 1f1b, 4 bits); seconds\n",
        table(_HEAD, rows),
    ])  # fmt: skip
    (_OUT / "table.md").write_text(text)
    print(text)
    draw(rows)


def draw(rows: list[Any]) -> None:
    """Plot the seconds until the first new step, and until the first step with the host again."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
    parts = [("noticed", "#D55E00"), ("the others are started", "#E69F00"), ("the next step", "#1a6fb0")]
    bars = {}
    for name, noticed, started, first, _, back, used in rows:
        bars[name] = [noticed, started - noticed, first - started]
        bars[f"{name}: it returns"] = [back, 0.0, used - back]
    for number, (label, colour) in enumerate(parts):
        left = [sum(seconds[:number]) for seconds in bars.values()]
        axes.barh(list(bars), [seconds[number] for seconds in bars.values()], left=left, color=colour, label=label)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    figure.legend(fontsize=8, frameon=False, ncols=3, loc="outside lower center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(_OUT / "plot.png", dpi=110)


run(main)
