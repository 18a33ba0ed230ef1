"""Whether a stage writes into what it is given, and what of that lies on one memory where it comes from.

Over a boundary each tensor arrives in memory of its own. A layer that writes into one (``x.mul_(2)``, a ReLU in place)
changes no other view of it then, nor what the layer that gave it has kept, as it does in one process.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from accept_mpi.codecs.tensors import Tensors
from accept_mpi.models.memory import memory_of, overlap

HELD = " (an attribute)"
"""Behind the names of tensors that are attributes."""


@dataclass
class CommonMemory:
    """What forwards of one stage do. Tensors are meant by their places in a message."""

    written: set[int] = field(default_factory=set)
    """Inputs that are written to."""
    pairs: set[tuple[int, int]] = field(default_factory=set)
    """Outputs with values in common, the lower place first."""
    through: set[tuple[int, int]] = field(default_factory=set)
    """Inputs and outputs with values in common."""
    kept: dict[int, str] = field(default_factory=dict)
    """Outputs that have values in common with a module's state, and its name."""

    def look(
        self, inputs: Tensors, counts: Sequence[int], outputs: Sequence[torch.Tensor], state: dict[str, torch.Tensor]
    ) -> None:
        """Add what a forward has shown. ``counts``: the inputs' ``versions`` before it; ``state``: what modules have after
        it, by name."""
        self.written |= {n for n, count in enumerate(versions(inputs)) if count != counts[n]}
        for k, out in enumerate(outputs):
            self.pairs |= {(j, k) for j in range(k) if share_values(outputs[j], out)}
            self.through |= {(n, k) for n, x in enumerate(inputs) if x is not None and share_values(x, out)}
            if name := next((name for name, one in state.items() if share_values(one, out)), None):
                self.kept[k] = name

    def keep_only(self, remembered: Container[str]) -> None:
        """Of attributes, leave only those that later forwards read."""
        self.kept = {
            k: name for k, name in self.kept.items() if not name.endswith(HELD) or name.removesuffix(HELD) in remembered
        }

    def add(self, other: "CommonMemory") -> None:
        """Add what another trial has shown."""
        self.written |= other.written
        self.pairs |= other.pairs
        self.through |= other.through
        self.kept |= other.kept


class Cuts:
    """Which cuts would part a layer that writes into what it is given from what else has these values: another value that
    crosses there, or a parameter or buffer of an earlier layer. Found by one forward, layer by layer."""

    def __init__(self) -> None:
        self._state: dict[int, list[torch.Tensor]] = {}
        """What earlier layers have, by its memory."""
        self._crossing: dict[int, list[tuple[torch.Tensor, int]]] = {}
        """Of each cut, what has values in common with something else, and its version there."""

    def before(self, layer: int, inputs: Sequence[torch.Tensor], state: Iterable[torch.Tensor]) -> None:
        """A layer with this ``state`` is given ``inputs``."""
        plain = [x for x in inputs if x.layout is torch.strided and not x.is_inference()]
        others = [[*self._of(x), *plain[:n], *plain[n + 1 :]] for n, x in enumerate(plain)]
        common = [x for x, more in zip(plain, others, strict=True) if any(share_values(x, y) for y in more)]
        if common and layer > 0:
            self._crossing[layer] = [(x, x._version) for x in common]
        for one in state:
            if (memory := memory_of(one)) is not None:
                self._state.setdefault(memory._cdata, []).append(one)

    def parted(self) -> list[int]:
        """After the forward: the layers in front of which no cut may be."""
        return [cut for cut, crossing in self._crossing.items() if any(x._version != count for x, count in crossing)]

    def _of(self, x: torch.Tensor) -> list[torch.Tensor]:
        memory = memory_of(x)
        return [] if memory is None else self._state.get(memory._cdata, [])


def versions(inputs: Tensors) -> list[int]:
    """Torch's counts of writes; 0 for what torch does not count (``torch.inference_mode``)."""
    return [0 if x is None or x.is_inference() else x._version for x in inputs]


def share_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if a write to one of two tensors may change the other."""
    memory = memory_of(one)
    if memory is None or not overlap(one, other) or not one.numel() or not other.numel():
        return False
    if one.element_size() != other.element_size():
        return True
    marked = torch.zeros(memory.nbytes() // one.element_size(), dtype=torch.bool)
    _in(marked, one).fill_(True)
    return bool(_in(marked, other).any())


def _in(marked: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The marks of a tensor's values, each once where it is expanded."""
    once = [1 if stride == 0 else size for size, stride in zip(of.shape, of.stride(), strict=True)]
    return marked.as_strided(once, of.stride(), of.storage_offset())


def why_parted(stages: Iterable[CommonMemory]) -> tuple[int, str] | None:
    """Of consecutive stages, the first that writes into what has other values in common with it in an earlier one, and what
    has; None if there is none."""
    pairs: set[tuple[int, int]] = set()
    kept: dict[int, str] = {}
    for s, one in enumerate(stages):
        for place in sorted(one.written):
            if any(place in pair for pair in pairs):
                return s, "another value that it gives"
            if place in kept:
                return s, kept[place]
        onward: dict[int, list[int]] = {}
        for place, k in sorted(one.through):
            onward.setdefault(place, []).append(k)
        before, pairs = pairs, set(one.pairs)
        for i, j in before:
            pairs |= {(min(k, m), max(k, m)) for k in onward.get(i, ()) for m in onward.get(j, ()) if k != m}
        kept = one.kept | {k: name for i, name in kept.items() for k in onward.get(i, ())}
    return None
