"""AccEPT's headline, side by side with its peers: MobileNetV2 over four equal hosts, links from free to 5 Mbit/s."""

from harness.experiment import Experiment, run
from harness.side_by_side import Case, SideBySide

CASE = Case(
    title="MobileNetV2 32 x 32, batch 64, four hosts of 0.4 core",
    links=(0, 100, 50, 20, 10, 5),
    cuts=[9, 24, 39],
    ours={
        "1f1b-async": ("none", "uniform:8", "uniform:4", "uniform:2", "auto"),
        "1f1b": ("auto",),
        "zero-bubble": ("none", "uniform:4", "auto"),
    },
    samples=64,
    # As many samples a micro-batch in twice as many micro-batches: a longer step has a smaller bubble.
    synchronous={"train.batch_size": 128, "train.micro_batches": 16},
    hopeless=10,
)


def main() -> None:
    experiment = Experiment(__file__)
    with experiment.lab("fleet.toml"):
        found = SideBySide(experiment, CASE)
    found.draw()
    experiment.finish(found.text())


run(main)
