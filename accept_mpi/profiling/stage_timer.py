"""What a rank measures of itself before the first step: its stage's compute time, and what codecs cost here."""

import queue
import statistics
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from accept_mpi import tree
from accept_mpi.codecs.coding import NONE, Coding
from accept_mpi.codecs.message import (
    HEADER_BYTES,
    Bytes,
    Signature,
    Specs,
    Tensors,
    TensorSpec,
    aligned,
    buffer_bytes,
    decode,
    encode,
)
from accept_mpi.data import Dataset, Samples, fetch
from accept_mpi.device.cpu import computing_takes_all
from accept_mpi.pipeline.stage import Inputs, Stage
from accept_mpi.planning.forecast import Profile
from accept_mpi.profiling.layer_timer import stretch_of
from accept_mpi.tree import LONE, Tree

_CODEC_VALUES = 1 << 21  # more than caches hold, as boundaries' tensors are by the time they are coded
_CODEC_ROUNDS = 5
_SAMPLES = 8  # that a message says it holds
_MESSAGES = 20
_FEW_VALUES = 512
_CACHE_BYTES = 32 << 20


def profile(
    stage: Stage,
    size: int,
    behind: Signature,
    ahead: Signature,
    train: Dataset | None,
    codings: dict[str, Coding],
    byte_cpu: float,
    cores: float,
    budget: float = 1.0,
) -> Profile:
    """Measure for about ``budget`` seconds, longer than a CPU quota's period; leaves no trace in the stage.

    ``size``: samples a micro-batch. ``behind`` and ``ahead`` are empty at the ends of the pipeline; the first and the last
    stage need ``train``. ``byte_cpu``: CPU seconds to send or receive a byte. ``cores`` that this rank has. All
    ranks do this at the same time, since that is how they will share what they share.
    """
    data = Samples(None, None)
    if train is not None:
        data = fetch(train, np.arange(size) % len(train), 0, inputs=not behind.forward, targets=not ahead.forward)
    times: list[tuple[float, float]] = []
    wall = 0.0
    until = time.perf_counter() + budget
    with stage.trial() as trial:
        while len(times) < 2 or time.perf_counter() < until:
            given = _given(stage, size, behind, data)
            halfway: list[float] = []

            def gradients(_: Sequence[TensorSpec], of: Tree, halfway: list[float] = halfway) -> Tensors:
                zeros = tuple(spec.zeros() for spec in ahead.backward[size]) if ahead.forward else ()
                halfway.append(time.thread_time())
                return zeros

            began, cpu = time.perf_counter(), time.thread_time()
            trial.probe(given.tensors, data.targets, gradients, given.tree, size)
            times.append((halfway[0] - cpu, time.thread_time() - halfway[0]))
            wall += time.perf_counter() - began if len(times) > 1 else 0.0
    # Of CPU, in a fast round: a process's first ones take memory from the kernel, up to three times as long. Then stretched
    # as all rounds were: where a quota stops the rank now and then, that is part of its speed.
    forward, backward = (float(np.quantile(column, 0.25)) for column in zip(*times[1:], strict=True))
    stretch = stretch_of(wall, sum(map(sum, times[1:])))
    costs = codec_costs(codings)
    shared = computing_takes_all(cores)
    return Profile(
        forward=stretch * forward,
        backward=stretch * backward,
        encode={name: stretch * encode for name, (encode, _) in costs.items()},
        decode={name: stretch * decode for name, (_, decode) in costs.items()},
        byte=stretch * byte_cpu,
        message=stretch * message_cost(one_that_codes(codings)) if shared else 0.0,
        shared=shared,
    )


def _given(stage: Stage, size: int, behind: Signature, data: Samples) -> Inputs:
    """Inputs of the shapes that training has, new ones each time: a layer may work in place."""
    if behind.forward:
        return Inputs(tuple(spec.zeros() for spec in behind.forward[size]), behind.trees.get(size, LONE))
    return stage.from_data(tree.replace(data.inputs, torch.clone))


def one_that_codes(codings: Mapping[str, Coding]) -> Coding:
    """One of them that codes, if there is one: what a message takes whatever its size, it takes with any codec."""
    return max(codings.values(), key=lambda coding: coding.kind != "none", default=NONE)


def codec_costs(codings: Mapping[str, Coding]) -> dict[str, tuple[float, float]]:
    """CPU seconds a value to make a message of float32 values, and to make values of a message, by codec: coding, or, where
    there is no codec, copying, which costs as much as few bits do; and the checksum. Codecs take turns, so that a moment in
    which the machine is slow is not one codec's."""
    specs = (TensorSpec((_CODEC_VALUES,), (1,), "float32"),)
    values = (torch.randn(_CODEC_VALUES, generator=torch.Generator().manual_seed(0)),)
    buffer = aligned(max((buffer_bytes(specs, coding) for coding in codings.values()), default=0))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in codings}
    for _ in range(_CODEC_ROUNDS):
        for name, coding in codings.items():
            began = time.thread_time()
            wire = _encoded(specs, values, buffer, coding)
            halfway = time.thread_time()
            decode({_SAMPLES: specs}, buffer[:wire], coding)
            times[name].append((halfway - began, time.thread_time() - halfway))
    ways = {name: list(zip(*each, strict=True)) for name, each in times.items()}
    return {name: (_each(encoding), _each(decoding)) for name, (encoding, decoding) in ways.items()}


def _each(times: Sequence[float]) -> float:
    """Seconds a value."""
    return statistics.median(times) / _CODEC_VALUES


def _encoded(specs: Specs, values: Tensors, buffer: Bytes, coding: Coding) -> int:
    """Write a message; its length in bytes."""
    fields = {"step": 0, "micro_batch": 0, "samples": _SAMPLES, "flags": 0, "direction": 0, "boundary": 0, "scale": 1.0}
    header = encode(specs, values, buffer, coding, 0, now=time.monotonic, **fields)  # type: ignore[arg-type]
    return HEADER_BYTES + header.length


def message_cost(coding: Coding = NONE) -> float:
    """CPU seconds that a message takes whatever its size, this side of MPI, with cold caches: header, checks, and two
    threads that hand it over."""
    spec = TensorSpec((_FEW_VALUES,), (1,), "float32")
    specs, values = (spec,), torch.zeros(_FEW_VALUES)
    buffer = aligned(buffer_bytes(specs, coding))
    there: queue.SimpleQueue[object] = queue.SimpleQueue()
    back: queue.SimpleQueue[object] = queue.SimpleQueue()

    def answer() -> None:
        while there.get() is not None:
            back.put(1)

    other = threading.Thread(target=answer, daemon=True)
    other.start()
    times = []
    scratch = np.ones(_CACHE_BYTES // 8)
    image, weight = torch.zeros(2, 32, 16, 16), torch.zeros(32, 32, 3, 3, requires_grad=True)

    def compute() -> None:
        torch.nn.functional.conv2d(image, weight).sum().backward()
        np.add(scratch, 1, out=scratch)

    for _ in range(_MESSAGES):
        compute()  # which has filled all caches, with its code too, by the time a message comes: that takes 4 x as long
        began = time.process_time()
        wire = _encoded(specs, (spec.flatten(values),), buffer, coding)
        there.put(1)
        back.get()
        half = time.process_time() - began
        compute()
        began = time.process_time()
        decode({_SAMPLES: specs}, buffer[:wire], coding)
        times.append(half + time.process_time() - began)
    there.put(None)
    other.join()
    return statistics.median(times) / 2
