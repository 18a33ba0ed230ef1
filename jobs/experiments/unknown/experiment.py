"""FTPipeHD's comparison: two devices are ten times as fast as the third, but the first plan, even cuts, does not know it.
Adaptation improves it: whenever that pays, or with the paper's fixed period.
"""

from pathlib import Path
from typing import Any

from accept_mpi.device.fleet import read
from accept_mpi.logs.reader import open_log
from edgelab.laboratory import Laboratory
from harness.experiment import run
from harness.live import anew, plot_rates, rate, start, wait_for_step
from harness.store import table

_FOLDER = Path(__file__).resolve().parent
_OUT = Path("runs/experiments/unknown")
_PAPER = 6.8
_WARM = 7  # steps that do not count, in which a process takes its memory from the kernel
_RUNS = {  # pipeline.adapt, and the number of steps
    "even cuts stay": ("false", 14),
    "adapting when it pays": ("true", 70),
    "every 10 steps (FTPipeHD)": ("10", 70),
}


def main() -> None:
    _OUT.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    moves: dict[str, list[str]] = {}
    with Laboratory("experiment-unknown").using(read(_FOLDER / "fleet.toml")) as lab:
        for name, (adapt, last) in _RUNS.items():
            directory = anew(_OUT / f"adapt-{adapt}")
            with start(lab, _FOLDER / "job.toml", directory, "--set", f"pipeline.adapt={adapt}", drain=True):
                wait_for_step(directory, last)
            with open_log(directory / "log.h5") as log:
                found[name], events = log["steps"][:], [text.decode() for text in log["events"]["text"]]
            moves[name] = [text for text in events if text.startswith(("moved", "dealt"))]
            print(f"{name}: {moves[name]}", flush=True)
    rates = {name: rate(steps, max(_WARM, int(steps["step"][-1]) - 25), 70) for name, steps in found.items()}
    even, adapted = list(rates.values())[:2]
    text = "\n".join([
        "# Two devices ten times as fast as the third, not known beforehand (100 Mbit/s, MobileNetV2, 4 bits)\n",
        table(["cuts", "samples/s in the end", "x even cuts"], [[name, each, each / even] for name, each in rates.items()]),
        f"\nFrom even cuts by adaptation alone: {adapted / even:.1f} x (FTPipeHD's paper: {_PAPER} x).\n",
        *(f"    {name}: {move}" for name, each in moves.items() for move in each),
        "",
    ])  # fmt: skip
    (_OUT / "table.md").write_text(text)
    print(text)
    plot_rates(_OUT / "plot.png", found)


run(main)
