"""Measures the CPU seconds that messages and codecs cost on this device."""

import queue
import statistics
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from accept_mpi.codecs.basis import NO_BASES, Bases, Basis
from accept_mpi.codecs.coding import NONE, Coding
from accept_mpi.codecs.message import HEADER_BYTES, Bytes, Label, aligned, buffer_bytes, decode, encode
from accept_mpi.codecs.tensors import Specs, Tensors, TensorSpec
from accept_mpi.direction import Direction

_CODEC_VALUES = 1 << 21  # more than the caches hold: in training, tensors have left these by the time they are coded
_COMPONENTS = 256  # of rows that are coded in a basis, whose seconds are proportional to it
_CODEC_ROUNDS = 5
_SAMPLES = 8  # number of samples in the label of a message
_MESSAGES = 20
_FEW_VALUES = 512
_CACHE_BYTES = 32 << 20


class MessageCosts(msgspec.Struct, frozen=True):
    """CPU seconds that messages cost a device."""

    codecs: dict[str, tuple[float, float]]
    """Seconds to encode and to decode a value, by codec."""
    seconds_per_byte: float
    """Seconds to send or receive a byte."""
    seconds_per_message: float
    """Seconds to send or receive a message, without its bytes and coding."""


def message_costs(codings: Mapping[str, Coding], seconds_per_byte: float, seconds_per_message: float = 0.0) -> MessageCosts:
    """Measure what messages cost on this device outside MPI, and add MPI's own seconds per byte and per message, which
    ``comm.links`` measures."""
    here = message_cost(one_that_codes(codings))
    return MessageCosts(codec_costs(codings), seconds_per_byte, seconds_per_message + here)


def one_that_codes(codings: Mapping[str, Coding]) -> Coding:
    """A coding that codes, if there is one, for ``message_cost``, whose result does not depend on which one it is."""
    return max(codings.values(), key=lambda coding: coding.kind != "none", default=NONE)


def codec_costs(codings: Mapping[str, Coding]) -> dict[str, tuple[float, float]]:
    """CPU seconds per float32 value to encode and to decode a message, by codec.

    They include the checksum and, with "none", copying, which costs as much as coding with few bits. Codecs take turns, so
    that a slow moment of the machine affects all of them.
    """
    specs = (TensorSpec((_CODEC_VALUES // _COMPONENTS, _COMPONENTS), (_COMPONENTS, 1), "float32"),)
    same = torch.eye(_COMPONENTS)
    basis = {0: Basis(torch.zeros(_COMPONENTS), same, same)}
    values = (torch.randn(_CODEC_VALUES, generator=torch.Generator().manual_seed(0)),)
    buffer = aligned(max((buffer_bytes(specs, coding) for coding in codings.values()), default=0))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in codings}
    for _ in range(_CODEC_ROUNDS):
        for name, coding in codings.items():
            bases = basis if coding.basis else {}
            began = time.thread_time()
            wire = _encoded(specs, values, buffer, coding, bases)
            halfway = time.thread_time()
            decode({_SAMPLES: specs}, buffer[:wire], coding, bases=bases)
            times[name].append((halfway - began, time.thread_time() - halfway))
    ways = {name: list(zip(*each, strict=True)) for name, each in times.items()}
    return {name: (_each(encoding), _each(decoding)) for name, (encoding, decoding) in ways.items()}


def _each(times: Sequence[float]) -> float:
    """Seconds per value: the median of ``times`` of whole messages, divided by their number of values."""
    return statistics.median(times) / _CODEC_VALUES


def _encoded(specs: Specs, values: Tensors, buffer: Bytes, coding: Coding, bases: Bases = NO_BASES) -> int:
    """Encode a message into ``buffer``; returns its length in bytes."""
    label = Label(direction=Direction.FORWARD, boundary=0, step=0, micro_batch=0, samples=_SAMPLES)
    header = encode(label, specs, values, buffer, coding, now=time.monotonic, bases=bases)
    return HEADER_BYTES + header.length


def message_cost(coding: Coding = NONE) -> float:
    """CPU seconds per message that do not depend on its size, with cold caches and without MPI: the header, its checks, and
    the handover between two threads."""
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
        compute()  # fills the caches with other data and code, as in training: a message then takes 4 x as long
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
