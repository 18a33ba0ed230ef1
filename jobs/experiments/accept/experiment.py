"""AccEPT's main experiment, with its peers: MobileNetV2 over four equal hosts, on links from unlimited to 5 Mbit/s."""

from harness.experiment import run
from harness.side_by_side import Case, compare

CASE = Case(
    title="MobileNetV2 32 x 32, batch 64, four hosts of 0.4 core",
    links=(0, 100, 50, 20, 10, 5),
    untuned=(100,),
    cuts=[9, 21, 39],
    slow_cuts={10: [12, 27, 39], 5: [12, 27, 39]},
    ours={
        "1f1b-async": ("none", "uniform:8", "uniform:4", "uniform:2", "auto"),
        "zero-bubble": ("uniform:2", "auto"),
    },
    codec_links={"none": (0, 100), "uniform:8": (100,), "uniform:2": (100, 20, 10, 5)},
    samples=64,
    # Eight times as many micro-batches of the same size: a longer step has a smaller bubble.
    synchronous_links=(100,),
    synchronous={"train.batch_size": 512, "train.micro_batches": 32},
    # Cuts that split blocks evenly: splitting layers evenly would cut inside blocks, where six times as much crosses.
    pipelining={"set": ["train.micro_batches=8"], "cuts": [12, 27, 39]},
    hopeless=20,
    seconds=5.0,
)

run(lambda: compare(__file__, CASE))
