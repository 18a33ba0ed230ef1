"""Kernels compiled by ranks together: of those with one kind of processor, each compiles some, and gets the rest."""

import contextlib
import time
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from accept_mpi.comm.messages import MachineCode
from accept_mpi.comm.runtime import Runtime
from accept_mpi.kernels.cache import at_hand, compiled, is_stored, store, stored, version, where

SECONDS = {
    "half": 0.3, "uniform_decoder": 0.8, "simulator": 1.1, "search": 1.4, "uniform": 1.8, "beam": 2.4, "entropy": 4.8,
    "mbq": 5.5,
}  # fmt: skip
"""CPU seconds that compiling a module takes, on one x86-64; only how they compare counts."""
_FIRST = 0.8  # more for whatever a process compiles first
_FILES = msgspec.msgpack.Decoder(dict[str, dict[str, bytes]])
_WHAT = "compiled kernels"


class Has(NamedTuple):
    """What a rank has of the modules of kernels that any rank wants."""

    version: str = ""
    """Ranks with the same one can use each other's machine code; empty: this rank takes no part."""
    place: tuple[object, ...] = ()
    """Ranks with the same one share a cache."""
    here: tuple[str, ...] = ()
    """Modules in its cache."""
    lacks: tuple[str, ...] = ()
    """Modules that it wants and does not have."""
    busy: float = 0.0
    """CPU seconds that it will be busy with something else."""


class Sent(NamedTuple):
    """A module that a rank compiles, if it does not have it, for others."""

    module: str
    source: int
    receivers: tuple[int, ...]


class Meanwhile(NamedTuple):
    """What a rank does while others compile."""

    do: Callable[[], object]
    seconds: float
    """CPU seconds that it takes, on the machine of ``SECONDS``."""


def compile_together(runtime: Runtime, modules: Sequence[str], meanwhile: Meanwhile | None = None) -> float:
    """Make the machine code of ``modules`` ready on this rank; other ranks may want others. All ranks call this together.
    Returns the seconds that it took here, waiting included. Raises DeadlineError.

    Without the machine code of others, for whatever reason, a rank compiles for itself. ``meanwhile``: what this rank does
    while others may be compiling; it gets less to compile for it.
    """
    began, seconds = time.perf_counter(), runtime.startup_seconds
    mine = [module for module in modules if not at_hand(module)]
    wanted = sorted({one for rank in runtime.messenger.allgather(mine, seconds, _WHAT) for one in rank})
    if wanted:
        told = runtime.messenger.allgather(_has(runtime, mine, wanted, meanwhile), seconds, _WHAT)
        ranks = [msgspec.convert(one, Has) for one in told]
        sent = shares(ranks)
        _compile_and_send(runtime, ranks, sent)
        if meanwhile:
            meanwhile.do()
        _receive(runtime, sent)
    for module in modules:
        compiled(module)
    return time.perf_counter() - began


def _has(runtime: Runtime, mine: Sequence[str], wanted: Sequence[str], meanwhile: Meanwhile | None) -> Has:
    """What this rank has. One that wants nothing is spared from loading the compiler."""
    if mine:
        with contextlib.suppress(Exception):  # no place for a cache
            place = (runtime.hosts[runtime.rank]["machine_id"], *where())
            here = tuple(module for module in wanted if is_stored(module))
            lacks = tuple(module for module in mine if module not in here)
            return Has(version(), place, here, lacks, meanwhile.seconds if meanwhile else 0.0)
    return Has()


def shares(ranks: Sequence[Has]) -> list[Sent]:
    """Which rank sends which module to whom: whoever has it, else the rank that will have compiled it first. The same on
    every rank."""
    found = []
    load = [rank.busy for rank in ranks]
    begun: set[int] = set()
    for kind in sorted({rank.version for rank in ranks} - {""}):
        alike = [number for number, rank in enumerate(ranks) if rank.version == kind]
        lacked = {module for number in alike for module in ranks[number].lacks}
        for module in sorted(lacked, key=lambda module: (-SECONDS.get(module, 1.0), module)):
            having = [number for number in alike if module in ranks[number].here]
            loaded = {number: load[number] + (0.0 if number in begun else _FIRST) for number in alike}
            source = having[0] if having else min(alike, key=lambda number: (loaded[number], number))
            if not having:
                load[source] = loaded[source] + SECONDS.get(module, 1.0)
                begun.add(source)
            lacking = (number for number in alike if module in ranks[number].lacks and number != source)
            found.append(Sent(module, source, tuple(lacking)))
    return found


def _compile_and_send(runtime: Runtime, ranks: Sequence[Has], sent: Sequence[Sent]) -> None:
    """Compile this rank's share, and send it to those that lack it."""
    me = runtime.rank
    mine = [one for one in sent if one.source == me]
    for one in mine:
        with contextlib.suppress(Exception):  # told when this rank itself needs it
            if one.module not in ranks[me].here:
                compiled(one.module)
    packed = cache(_packed)  # since several receivers mostly lack the same
    for receiver in sorted({number for one in mine for number in one.receivers}):
        apart = ranks[receiver].place != ranks[me].place
        theirs = tuple(one.module for one in mine if receiver in one.receivers)
        runtime.messenger.send(receiver, MachineCode(packed(theirs) if apart else b""))


def _receive(runtime: Runtime, sent: Sequence[Sent]) -> None:
    """Put what this rank lacks into its cache, as soon as it has come from those who compile it."""
    sources = {one.source for one in sent if runtime.rank in one.receivers}
    for message in runtime.messenger.expect(MachineCode, sources, runtime.startup_seconds, _WHAT).values():
        with contextlib.suppress(zlib.error, msgspec.DecodeError):
            for module, code in (_FILES.decode(zlib.decompress(message.packed)) if message.packed else {}).items():
                store(module, code)
    runtime.messenger.flush(runtime.startup_seconds, _WHAT)


def _packed(modules: Sequence[str]) -> bytes:
    """What the cache has of these modules, as ``MachineCode`` sends it."""
    return zlib.compress(msgspec.msgpack.encode({module: files for module in modules if (files := stored(module))}))
