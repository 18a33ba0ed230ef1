"""A session's program: every host computes alone at the same time as the others, nothing is sent: the hardware's limit.

A point has ``job``, ``tuned``, ``seconds``, and ``cuts``: None (each host trains the whole model) or the first layers of stages 1,
2, ... (each host runs forward and backward of its stage, on inputs that the stages before have made).
"""

import os
import time
from typing import Any

import torch

from harness.peer import Setting, keep_memory, loss_of
from harness.session import points


def main() -> None:
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for point, answer in points():
        if point["tuned"]:
            keep_memory()
        answer({"samples_per_s": measure(Setting(point), point, rank, size)})


def measure(setting: Setting, point: dict[str, Any], rank: int, size: int) -> float:
    """samples/s of this host while the others compute too."""
    whole = point["cuts"] is None
    start, stop = (0, len(setting.chain)) if whole else setting.edges(size, point["cuts"])[rank]
    layers, last = setting.layers(start, stop), stop == len(setting.chain)
    optimizer = setting.optimizer(layers)
    micro = setting.batch // setting.micro_batches
    inputs, target = next(setting.batches(slice(0, micro)))
    values: Any = inputs
    if start:
        with torch.no_grad():
            values = setting.layers(0, start)(inputs)
    packed = isinstance(values, tuple)
    tensors = [v.detach() for v in (values if packed else (values,))]

    def one() -> None:
        given = [t.detach().requires_grad_(start > 0 and t.is_floating_point()) for t in tensors]
        out = layers(tuple(given) if packed else given[0])
        if last:
            (loss_of(out, target) / setting.micro_batches).backward()
        else:
            outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
            torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])

    def batch() -> None:
        for _ in range(setting.micro_batches):
            one()
        optimizer.step()
        optimizer.zero_grad()

    def run(seconds: float) -> float:
        began, done = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds or not done:
            batch()
            done += setting.batch
        return done / passed

    run(2.0)  # warm up; by then all hosts compute
    rate = run(point["seconds"])
    run(2.0)  # the others are still measuring
    return rate


main()
