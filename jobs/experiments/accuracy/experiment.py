"""Seconds until a test accuracy is reached, at 20 Mbit/s: systems differ in how much a step learns as well as in speed."""

from accept_mpi.logs.figures import pyplot
from harness.experiment import Experiment, run
from harness.store import Result, table

UNTIL, MOST_SECONDS = 0.95, 100.0
OURS = {
    "accept_mpi async, auto": {"pipeline.forward": "auto", "pipeline.backward": "auto"},
    "accept_mpi zero-bubble, auto": {
        "pipeline.schedule": "zero-bubble",
        "train.micro_batches": 8,
        "pipeline.forward": "auto",
        "pipeline.backward": "auto",
    },
}
PEERS = {
    "torch DDP, PowerSGD": ("ddp", {"powersgd": True}),
    "torch pipelining, 1F1B": ("pipelining", {"set": ["train.micro_batches=8"], "cuts": [12, 27, 39]}),
    "torch DDP": ("ddp", {"powersgd": False}),
}


def main() -> None:
    experiment = Experiment(__file__)
    found: dict[str, Result] = {}
    with experiment.lab("fleet.toml") as lab:
        for name, settings in OURS.items():
            found[name] = experiment.train(None, settings, skip=2, system=name)
        for name, (program, more) in PEERS.items():
            asked = {"job": experiment.job(), "tuned": True, "until": UNTIL, "seconds": MOST_SECONDS} | more
            found[name] = experiment.measure(program, {"system": name}, asked)
        link = lab.hosts[0].link
    rows: list[list[object]] = []
    for name, result in found.items():
        reached = [seconds for seconds, accuracy in result["evals"] if accuracy >= UNTIL]
        last_seconds, last_accuracy = result["evals"][-1]
        took = f"{reached[0]:.0f} s" if reached else f"not in {last_seconds:.0f} s ({100 * last_accuracy:.1f} %)"
        rows.append([name, took, result["samples_per_s"]])
    draw(experiment, found)
    title = f"# MobileNetV2 on digits, four hosts of 0.4 core, {link:g} Mbit/s\n"
    experiment.finish(f"{title}\n{table(['system', f'test accuracy {100 * UNTIL:.0f} % after', 'samples/s'], rows)}")


def draw(experiment: Experiment, found: dict[str, Result]) -> None:
    """Plot test accuracy over seconds of training, one line per system."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    colours = ["#003f7d", "#CC79A7", "#009E73", "#D55E00", "#E69F00"]
    for (name, result), colour in zip(found.items(), colours, strict=True):
        seconds, accuracy = zip(*result["evals"], strict=True)
        axes.plot(seconds, [100 * a for a in accuracy], "o-", label=name, color=colour, markersize=4)
    axes.axhline(100 * UNTIL, color="#555555", linewidth=1, linestyle=":")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("MobileNetV2 on digits, four hosts on 20 Mbit/s", fontsize=11)
    figure.legend(fontsize=8, frameon=False, ncols=3, loc="outside lower center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(experiment.out / "plot.png", dpi=110)


run(main)
