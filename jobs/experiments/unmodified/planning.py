"""Seconds of planning for a recorded model of 150 layers, against a model of the zoo with as many, on four devices on paper.

PYTHONPATH=. python jobs/experiments/unmodified/planning.py
"""

import statistics
import time

import msgspec
import torch

from accept_mpi.job_file import parse
from accept_mpi.models import chain_of
from accept_mpi.planning.codec_choice import codings_of
from accept_mpi.planning.planner import plans_for
from accept_mpi.profiling.cluster_profile import ClusterProfile, DeviceProfile
from accept_mpi.profiling.outline import outline_of

TURNS, DEVICES = 5, 4
JOB = """
data.name = "text"
output.directory = "x"
[model]
name = "{name}"
args = {args}
[train]
steps = 1
[pipeline]
schedule = "1f1b-async"
forward = "auto"
backward = "auto"
"""
RECORDED = ("transformers:GPT2LMHeadModel",
            "{ vocab_size = 100, n_embd = 64, n_layer = 50, n_head = 2, tie_word_embeddings = false, bos_token_id = 1, "
            "eos_token_id = 2 }")  # fmt: skip
ZOO = ("gpt", "{ context = 64, layers = 74, width = 64, heads = 2 }")


def cluster(name: str, args: str) -> tuple[ClusterProfile, object]:
    job = parse(JOB.format(name=name, args=args), "job")
    ids = torch.randint(100, (8, 64))
    value = {"input_ids": ids} if name.startswith("transformers") else ids
    began = time.monotonic()
    chain = chain_of(job, lambda: value)
    made = time.monotonic() - began
    model = outline_of(chain, job, (ids,), None if value is ids else tree_of(value), 8)
    print(f"{name}: {len(chain)} layers, made in {made:.2f} s, outlined in {time.monotonic() - began - made:.2f} s")
    each = [1e-9 * max(1.0, layer.operations) for layer in model.layers]
    codecs = codings_of(job)
    devices = [
        DeviceProfile(
            host=f"edge{n}", forward=[(1 + n) * one for one in each], backward=[2 * (1 + n) * one for one in each],
            weight_gradient=each, update=[0.0] * len(each), encode=dict.fromkeys(codecs, 1e-9),
            decode=dict.fromkeys(codecs, 1e-9), seconds_per_byte=1e-10, shared=True, memory=1e10,
        )
        for n in range(DEVICES)
    ]  # fmt: skip
    rate = [[1.2e7] * DEVICES for _ in range(DEVICES)]
    return ClusterProfile(model, devices, rate, [[1e-3] * DEVICES for _ in range(DEVICES)]), job


def tree_of(value: object) -> bytes:
    from accept_mpi import tree

    return tree.flatten(value)[1]


def main() -> None:
    torch.set_num_threads(1)
    both = [cluster(*RECORDED), cluster(*ZOO)]
    took: list[list[float]] = [[], []]
    for turn in range(TURNS + 1):
        for n, (profile, job) in enumerate(both):
            began = time.monotonic()
            plans_for(msgspec.structs.replace(profile), job)  # type: ignore[arg-type]
            if turn:  # kernels compile in the first
                took[n].append(time.monotonic() - began)
    mine, theirs = map(statistics.median, took)
    ratio = statistics.median(a / b for a, b in zip(*took, strict=True))
    print(f"planning for {DEVICES} devices: recorded {mine:.2f} s, zoo {theirs:.2f} s, {ratio:.2f} x")


if __name__ == "__main__":
    main()
