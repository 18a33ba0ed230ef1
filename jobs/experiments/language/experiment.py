"""A language model compared with the peers: GPT with 8 blocks of width 256 over four equal hosts, on several links."""

from harness.experiment import run
from harness.side_by_side import Case, compare

CASE = Case(
    title="GPT 8 x 256, context 128, batch 16, four hosts of 0.4 core",
    links=(0, 100, 20),
    untuned=(100,),
    cuts=[5, 9, 13],
    ours={"1f1b-async": ("none", "uniform:4", "auto"), "zero-bubble": ("auto",)},
    samples=16,
    synchronous_links=(100, 20),
    synchronous={"train.batch_size": 64, "train.micro_batches": 16},
    pipelining={"set": ["train.micro_batches=8"]},
    hopeless=20,
    seconds=8.0,
)

run(lambda: compare(__file__, CASE))
