"""A host falls to a tenth of its speed during a run, and recovers: adaptation against the unchanged plan, and against a run
that is planned for the slow host from the start.
"""

from pathlib import Path
from typing import Any

from accept_mpi.device.fleet import read
from accept_mpi.logs.format import Rows
from accept_mpi.logs.reader import open_log
from accept_mpi.logs.timeline import rank_use
from edgelab.laboratory import Laboratory
from harness.experiment import run
from harness.live import anew, plot_rates, rate, start, wait_for_step
from harness.store import table

_FOLDER = Path(__file__).resolve().parent
_OUT = Path("runs/experiments/slowdown")
_HOST = 2
# Step of the first change; steps until the next one; steps that adapting may take; steps measured after that.
_AT, _HOLD, _WITHIN, _LOOK = 45, 50, 20, 20
_PLANNED_FROM, _PLANNED = 8, 30  # first and last measured step of a run that is planned for the slow host

Run = dict[str, Any]


def watched(lab: Laboratory, name: str, *settings: str, changes: list[str], last: int) -> Run:
    """Run until step ``last``, and make the ``changes`` of the host at steps ``_AT``, ``_AT + _HOLD``, ...

    Returns the run's steps and trace, the steps at which the changes came, and its messages on moved layers.
    """
    directory, moments = anew(_OUT / name), []
    more = [word for setting in settings for word in ("--set", setting)]
    with start(lab, _FOLDER / "job.toml", directory, *more, drain=True):
        for number, change in enumerate(changes):
            step = wait_for_step(directory, _AT + number * _HOLD)
            lab.set(lab.hosts[_HOST].name, change)
            moments.append(step)
        wait_for_step(directory, last)
    with open_log(directory / "log.h5") as log:
        steps, trace, events = log["steps"][:], log["trace"][:], [text.decode() for text in log["events"]["text"]]
    moves = [text for text in events if text.startswith(("moved", "dealt"))]
    print(f"{name}: {moments}, {moves}", flush=True)
    return {"steps": steps, "trace": trace, "moments": moments, "moves": moves}


def computes(run: Run, first: int, last: int) -> float:
    """Share of the time between two steps in which the busiest stage computed; independent of the machine's speed."""
    start, end = (float(run["steps"]["end"][run["steps"]["step"] == step][0]) for step in (first, last))
    return max(use.busy for use in rank_use(run["trace"], start, end)) / (end - start)


def steps_until(steps: Rows, after: int, wanted: float) -> int:
    """Number of steps from ``after`` until five consecutive ones reach the ``wanted`` rate; -1 if none do."""
    for step in range(after, int(steps["step"][-1]) - 5):
        if rate(steps, step, step + 5) >= wanted:
            return step - after
    return -1


def slow_down() -> tuple[str, Run, Run]:
    """Make all runs; returns the report in Markdown, the adapting run and the one whose plan stays."""
    with Laboratory("experiment-slowdown").using(read(_FOLDER / "fleet.toml")) as lab:
        name = lab.hosts[_HOST].name
        lab.set(name, "cpu=0.04")
        planned = [watched(lab, "planned", changes=[], last=_PLANNED)]
        lab.set(name, "cpu=0.4")
        ours = watched(lab, "adapt", "pipeline.adapt=true", changes=["cpu=0.04", "cpu=0.4"], last=_AT + 2 * _HOLD)
        lab.set(name, "cpu=0.4")
        stays = watched(lab, "static", changes=["cpu=0.04"], last=_AT + 8)
        planned.append(watched(lab, "planned", changes=[], last=_PLANNED))
    steps, (slower, faster) = ours["steps"], ours["moments"]
    before = rate(steps, 25, slower)
    # Planned runs were made before and after, since the speed of a shared machine changes.
    optima = [rate(run["steps"], _PLANNED_FROM, _PLANNED) for run in planned]
    best = sum(optima) / len(optima)
    static = rate(stays["steps"], stays["moments"][0] + 3, int(stays["steps"]["step"][-1]))
    rows: list[list[object]] = []
    held = []
    for what, moment, optimum in (("falls to a tenth", slower, best), ("recovers", faster, before)):
        later = rate(steps, moment + _WITHIN, moment + _WITHIN + _LOOK)
        held.append(later)
        busy = computes(ours, moment + _WITHIN, moment + _WITHIN + _LOOK)
        rows.append([what, optimum, later, later / optimum, steps_until(steps, moment, 0.9 * optimum), f"{busy:.2f}"])
    ours_later = f"ours {_WITHIN} to {_WITHIN + _LOOK} steps later"
    head = ["the host", "samples/s of a run planned for it", ours_later, "ratio", "steps until 0.9 of it"]
    head.append("the busiest stage computes")
    shares = [computes(run, _PLANNED_FROM, _PLANNED) for run in planned]
    text = [
        "# One of four hosts falls to a tenth of its speed, and recovers (0.4 core each, 100 Mbit/s, MobileNetV2, 4 bits)\n",
        table(head, rows),
        "\nA run that is planned for the slow host, before and after: "
        + ", ".join(f"{rate:.1f} samples/s ({share:.2f})" for rate, share in zip(optima, shares, strict=True)),
        f"\nWhile slow {static:.1f} samples/s with the plan that stays: adapting is {held[0] / static:.1f} x as fast\n",
        *(f"    {move}" for move in ours["moves"]),
    ]
    return "\n".join([*text, ""]), ours, stays


def main() -> None:
    _OUT.mkdir(parents=True, exist_ok=True)
    text, ours, stays = slow_down()
    (_OUT / "table.md").write_text(text)
    print(text)
    steps = ours["steps"]
    moments = [float(steps["end"][steps["step"] == step][0] - steps["end"][0]) for step in ours["moments"]]
    plot_rates(_OUT / "plot.png", {"adapting": steps, "the plan stays": stays["steps"]}, moments)


run(main)
