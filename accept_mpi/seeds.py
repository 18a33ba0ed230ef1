"""Random seeds that depend on what is drawn, never on the rank that draws it."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = (1 << 64) - 1
GENERATORS = [torch.default_generator]
"""Torch's global random numbers: the host's, and those of the device that computes, if it has its own."""

DRAWING = threading.RLock()
"""Held by whoever draws random numbers, or puts back their state, while other threads may do so."""

# Purposes of seeds: the first word of every mix, so that no two uses can share a stream.
INIT, FORWARD, ORDER, AUGMENT, CODE, EVALUATE, BACKWARD = 1, 2, 3, 4, 5, 6, 7


def mix(*words: int) -> int:
    """Mix integers into one 64-bit seed (splitmix64 finalizer, Steele et al. 2014, applied word by word)."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ (word & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def init_seed(seed: int, layer: int) -> int:
    """Seed of a layer's initial weights."""
    return mix(INIT, seed, layer)


def forward_seed(seed: int, step: int, micro_batch: int, layer: int) -> int:
    """Seed for a layer's random numbers (dropout) in the forward of one micro-batch of one step."""
    return mix(FORWARD, seed, step, micro_batch, layer)


def evaluation_seed(seed: int, micro_batch: int, layer: int) -> int:
    """Seed for a layer's random numbers in the evaluation of one micro-batch of the test set."""
    return mix(EVALUATE, seed, micro_batch, layer)


def backward_seed(seed: int, step: int, micro_batch: int, layer: int) -> int:
    """Seed for the random numbers of a stage, whose first layer is ``layer``, in the backward of one micro-batch."""
    return mix(BACKWARD, seed, step, micro_batch, layer)


def seed_all(seed: int) -> None:
    """Seed torch's, NumPy's and Python's global random numbers."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_torch(seed: int) -> None:
    """Seed torch's global random numbers, on the host and where the stage is computed."""
    for generator in GENERATORS:
        generator.manual_seed(seed)


def state() -> tuple[object, ...]:
    """State of torch's, NumPy's and Python's global random numbers, to compare."""
    own = b"".join(_state_of(generator).numpy().tobytes() for generator in GENERATORS)
    numpy = np.random.get_state(legacy=False)
    return own, numpy["state"]["key"].tobytes(), numpy["state"]["pos"], numpy["has_gauss"], random.getstate()


def _state_of(generator: torch.Generator) -> torch.Tensor:
    """State of a generator, read without the risk of a deadlock between threads.

    ``get_state`` makes a tensor while it holds the generator's lock. Up to Python 3.11 that may start the garbage collector,
    and freeing a tensor gives up the GIL: another thread that seeds or reads the same generator then waits for its lock and
    keeps the GIL for ever. A generator's clone has a lock of its own, and making it starts no collector.
    """
    return generator.clone_state().get_state()


@contextmanager
def kept() -> Iterator[None]:
    """Restore torch's, NumPy's and Python's global random numbers on exit."""
    python, numpy, own = random.getstate(), np.random.get_state(), list(map(_state_of, GENERATORS))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, before in zip(GENERATORS, own, strict=True):
            generator.set_state(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's, NumPy's and Python's global random numbers, and restore them on exit."""
    with kept():
        seed_all(seed)
        yield
