"""Speeds change. A host falls to a tenth of its speed in mid-run, and recovers: adaptation against the plan that stays, and
against a run that is planned for the slow host from its beginning. And FTPipeHD's comparison: two devices ten times as fast
as the third, which nobody knows beforehand; from even cuts by adaptation alone.
"""

from pathlib import Path
from typing import Any

from accept_mpi.figures import pyplot
from accept_mpi.fleet import read
from accept_mpi.log import Rows, open_log
from edgelab.laboratory import Laboratory
from harness.experiment import run
from harness.live import anew, start, wait_for_step
from harness.store import table

_FOLDER = Path(__file__).resolve().parent
_OUT = Path("runs/experiments/slowdown")
_HOST = 2
_AT, _HOLD, _WITHIN, _LOOK = 45, 50, 20, 20  # step of the change, steps until the next, steps that adapting may take
_PAPER = 6.8
_ADAPT, _EVEN = "pipeline.adapt=true", 'pipeline.cuts="even"'

Run = dict[str, Any]


def watched(lab: Laboratory, name: str, *settings: str, changes: list[str], last: int) -> Run:
    """A run until step ``last``; at step ``_AT``, ``_AT + _HOLD``, ... the host's share of a core becomes what ``changes``
    say. Its steps, when which change came, and what it said of its moves."""
    directory, moments = anew(_OUT / name), []
    more = [word for setting in settings for word in ("--set", setting)]
    with start(lab, _FOLDER / "job.toml", directory, *more, drain=True):
        for number, change in enumerate(changes):
            step = wait_for_step(directory, _AT + number * _HOLD)
            lab.set(lab.hosts[_HOST].name, change)
            moments.append(step)
        wait_for_step(directory, last)
    with open_log(directory / "log.h5") as log:
        steps, events = log["steps"][:], [text.decode() for text in log["events"]["text"]]
    moves = [text for text in events if text.startswith("moved")]
    print(f"{name}: {moments}, {moves}", flush=True)
    return {"steps": steps, "moments": moments, "moves": moves}


def rate(steps: Rows, first: int, last: int) -> float:
    """samples/s of steps after ``first``, up to ``last``."""
    rows = steps[(steps["step"] >= first) & (steps["step"] <= last)]
    return float(rows["samples"][1:].sum() / (rows["end"][-1] - rows["end"][0]))


def steps_until(steps: Rows, after: int, wanted: float) -> int:
    """Steps from ``after`` on until five in a row are made at this rate at least."""
    for step in range(after, int(steps["step"][-1]) - 5):
        if rate(steps, step, step + 5) >= wanted:
            return step - after
    return -1


def slow_down() -> tuple[str, dict[str, Run]]:
    with Laboratory("experiment-slowdown").using(read(_FOLDER / "fleet.toml")) as lab:
        name = lab.hosts[_HOST].name
        ours = watched(lab, "adapt", _ADAPT, changes=["cpu=0.04", "cpu=0.4"], last=_AT + 2 * _HOLD)
        lab.set(name, "cpu=0.4")
        stays = watched(lab, "static", changes=["cpu=0.04"], last=_AT + 8)
        planned = watched(lab, "planned", changes=[], last=30)
    steps, (slower, faster) = ours["steps"], ours["moments"]
    before, best = rate(steps, 25, slower), rate(planned["steps"], 8, 30)
    static = rate(stays["steps"], stays["moments"][0] + 3, int(stays["steps"]["step"][-1]))
    rows: list[list[object]] = []
    held = []
    for what, moment, optimum in (("falls to a tenth", slower, best), ("recovers", faster, before)):
        later = rate(steps, moment + _WITHIN, moment + _WITHIN + _LOOK)
        held.append(later)
        rows.append([what, optimum, later, later / optimum, steps_until(steps, moment, 0.9 * optimum)])
    ours_later = f"ours {_WITHIN} to {_WITHIN + _LOOK} steps later"
    head = ["the host", "samples/s of a run planned for it", ours_later, "ratio", "steps until 0.9 of it"]
    text = [
        "# One of four hosts falls to a tenth of its speed, and recovers (0.4 core each, 100 Mbit/s, MobileNetV2, 4 bits)\n",
        table(head, rows),
        f"\nWhile slow {static:.1f} samples/s with the plan that stays: adapting is {held[0] / static:.1f} x as fast\n",
        *(f"    {move}" for move in ours["moves"]),
    ]
    return "\n".join(text), {"adapting": ours, "the plan stays": stays}


def unknown() -> tuple[str, dict[str, Run]]:
    found = {}
    with Laboratory("experiment-slowdown").using(read(_FOLDER / "ten-ten-one.toml")) as lab:
        found["even cuts stay"] = watched(lab, "even", _EVEN, changes=[], last=9)
        found["adapting when it pays"] = watched(lab, "even-adapt", _EVEN, _ADAPT, changes=[], last=70)
        found["every 10 steps (FTPipeHD)"] = watched(lab, "even-period", _EVEN, "pipeline.adapt=10", changes=[], last=70)
        found["measured first"] = watched(lab, "even-auto", changes=[], last=40)
    rates = {name: rate(run_["steps"], max(4, int(run_["steps"]["step"][-1]) - 25), 70) for name, run_ in found.items()}
    even = rates["even cuts stay"]
    rows: list[list[object]] = [[name, value, value / even] for name, value in rates.items()]
    best = rates["adapting when it pays"] / even
    text = [
        "\n# Two devices ten times as fast as the third, not known beforehand (FTPipeHD, 100 Mbit/s)\n",
        table(["cuts", "samples/s in the end", "x even cuts"], rows),
        f"\nFrom even cuts by adaptation alone: {best:.1f} x (the paper: {_PAPER} x).\n",
        *(f"    {move}" for move in found["adapting when it pays"]["moves"]),
        "",
    ]
    return "\n".join(text), found


def draw(parts: list[tuple[str, dict[str, Run]]]) -> None:
    """samples/s by time, a panel for each of the two."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
    colours = ["#0072B2", "#D55E00", "#009E73", "#999999"]
    for axes, (title, runs), names in zip(panels, parts, (list(parts[0][1]), list(parts[1][1])), strict=True):
        for colour, name in zip(colours, names, strict=False):
            steps = runs[name]["steps"][1:]
            seconds = steps["end"] - steps["end"][0]
            axes.plot(seconds, steps["samples_per_s"], color=colour, label=name, linewidth=1.3)
            for moment in runs[name]["moments"] if name == "adapting" else []:
                axes.axvline(seconds[steps["step"] == moment][0], color="#777777", linestyle="--", linewidth=1)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("seconds")
        axes.set_ylabel("samples/s")
        axes.set_ylim(0, 170)
        axes.legend(frameon=False, fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(_OUT / "plot.png", dpi=110)


def main() -> None:
    _OUT.mkdir(parents=True, exist_ok=True)
    (first, changed), (second, guessed) = slow_down(), unknown()
    (_OUT / "table.md").write_text(f"{first}\n{second}")
    print(f"{first}\n{second}")
    draw([("A host falls to a tenth, and recovers", changed), ("10:10:1, from even cuts", guessed)])


run(main)
