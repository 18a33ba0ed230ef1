"""A session's program: all hosts compute simultaneously, each alone and without communication. This is the hardware's limit.

A point has ``job``, ``tuned``, ``seconds``, and ``cuts``: None (each host trains the whole model) or the first layers of
stages 1, 2, ... (each host runs forward and backward of its stage, on inputs computed by the layers before). With ``layers``
each host measures every layer of the model separately, in seconds per micro-batch.
"""

import json
import os
import time
from typing import Any

import torch

from harness.peer import Setting, loss_of
from harness.session import points


def main() -> None:
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    settings: dict[str, Setting] = {}
    for point, answer in points():
        known = json.dumps(point, sort_keys=True)
        setting = settings[known] = settings.get(known) or Setting(point)
        if point.get("layers"):
            answer({"samples_per_s": 0.0, "layer_seconds": by_layer(setting, point["seconds"])})
            continue
        answer({"samples_per_s": measure(setting, point, rank, size)})


def measure(setting: Setting, point: dict[str, Any], rank: int, size: int) -> float:
    """samples/s of this host while the others compute, too."""
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


def by_layer(setting: Setting, seconds: float) -> list[float]:
    """Mean seconds of each layer's forward plus backward: its CPU time, times the wall-clock time per CPU time of all."""
    layers = list(setting.layers(0, len(setting.chain)))
    inputs, target = next(setting.batches(slice(0, setting.batch // setting.micro_batches)))
    total, rounds, until = [0.0] * len(layers), 0, time.perf_counter() + seconds
    wall, used = 0.0, 0.0
    while time.perf_counter() < until or rounds < 2:
        if rounds == 1:
            wall, used = time.perf_counter(), time.thread_time()
        values: Any = inputs
        for index, layer in enumerate(layers):
            packed = isinstance(values, tuple)
            given = [v.detach() for v in (values if packed else (values,))]
            given = [v.requires_grad_(index > 0 and v.is_floating_point()) for v in given]
            began = time.thread_time()
            values = layer(tuple(given) if packed else given[0])
            if index + 1 == len(layers):
                loss_of(values, target).backward()
            else:
                outs = [v for v in (values if isinstance(values, tuple) else (values,)) if v.requires_grad]
                torch.autograd.backward(outs, [torch.ones_like(v) for v in outs])
            if rounds:
                total[index] += time.thread_time() - began
        rounds += 1
    stretch = (time.perf_counter() - wall) / (time.thread_time() - used)
    return [stretch * t / (rounds - 1) for t in total]


main()
