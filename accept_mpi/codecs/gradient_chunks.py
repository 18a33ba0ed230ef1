"""Gradients of a stage as chunks: ranges of values that are sent, added up and owned as one."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from accept_mpi.codecs.message import ALIGN
from accept_mpi.codecs.tensors import TensorSpec

Gradients = list[torch.Tensor | None]
"""Gradients of a stage's parameters, in their order; None where a parameter got none."""

_CHUNK = 1 << 18  # values per message: others can pass in between
_SMALL = 1 << 11  # values per owner up to which one of them owns all: a message costs more


class _Piece(NamedTuple):
    """A range of a parameter's values, as they lie in memory."""

    parameter: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class _Run(NamedTuple):
    """Neighbouring chunks of one dtype, which one call packs."""

    chunks: list[int]
    sizes: list[int]
    pieces: list[_Piece]
    """Of all of them; a parameter's are one."""


class Layout:
    """Gradients as chunks: the values of all parameters of a dtype, one after the other, cut into equal ranges, as many for
    each owner. The first chunk says which parameters have a gradient."""

    def __init__(self, parameters: Sequence[torch.Tensor], owners: int, layers: Sequence[int] = ()) -> None:
        """``layers``: the first layer that has each parameter, if chunks may be sent while others are still to come."""
        self._like = parameters
        self._dense = [torch.empty_like(p, device="meta") for p in parameters]
        self._laid = [(dense.numel(), dense.stride()) for dense in self._dense]
        self.chunks: list[list[_Piece]] = [[]]
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            sizes = {n: p.numel() for n, p in enumerate(parameters) if p.dtype == dtype}
            self.chunks += _ranges(sizes, _values(sum(sizes.values()), owners))
        self._first = [-1, *(min(layers[piece.parameter] for piece in pieces) for pieces in self.chunks[1:] if layers)]
        """The first layer that has values in each chunk. Which parameters have a gradient is known last."""
        self._runs: dict[tuple[int, ...], list[_Run]] = {}

    @property
    def layers(self) -> set[int]:
        """The layers that are the first of a chunk's: once the gradients of all layers from one of them on are there, so is
        the chunk."""
        return set(self._first[1:])

    def whole(self, layer: int, without: Collection[int]) -> list[int]:
        """The chunks, ``without`` some, that are there once the gradients of all layers from ``layer`` on are."""
        return [c for c, first in enumerate(self._first) if first >= layer and c not in without]

    def within(self, chunks: Collection[int]) -> list[int]:
        """The parameters of chunks, each once."""
        return list(dict.fromkeys(piece.parameter for c in chunks for piece in self.chunks[c]))

    def spec(self, c: int) -> TensorSpec:
        """Spec of the tensor that a chunk is."""
        if c == 0:
            return TensorSpec.of(torch.empty(len(self._like), dtype=torch.uint8, device="meta"))
        return TensorSpec.of(torch.empty(self._size(c), dtype=self._dtype(c), device="meta"))

    def owners(self, members: int) -> list[int]:
        """The member that owns each chunk: all own about as much."""
        loads, found = [0] * members, []
        for c in range(len(self.chunks)):
            owner = loads.index(min(loads))
            loads[owner] += self._size(c)
            found.append(owner)
        return found

    def pack(self, gradients: Gradients, without: Collection[int] = ()) -> dict[int, torch.Tensor]:
        """The chunks of these gradients, ``without`` some."""
        return self.pack_some(gradients, [c for c in range(len(self.chunks)) if c not in without])

    def pack_some(self, gradients: Gradients, chunks: Sequence[int]) -> dict[int, torch.Tensor]:
        """These chunks, in ascending order, of gradients of which no others need be there. As few calls as possible: between
        convolutions each takes some 20 us."""
        found = {}
        if 0 in chunks:
            found[0] = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
        if (key := tuple(chunks)) not in self._runs:
            self._runs[key] = self._in_runs(chunks)
        for run in self._runs[key]:
            flat = torch.cat([self._values(piece, gradients[piece.parameter]) for piece in run.pieces])
            found |= zip(run.chunks, flat.split(run.sizes), strict=True)
        return found

    def unpack(self, chunks: Sequence[torch.Tensor]) -> Gradients:
        """The gradients in chunks, each laid out like its parameter. Whole ones share the chunks' memory."""
        parts: list[list[torch.Tensor]] = [[] for _ in self._like]
        for pieces, values in zip(self.chunks[1:], chunks[1:], strict=True):
            at = 0
            for piece in pieces:
                parts[piece.parameter].append(values[at : at + piece.size])
                at += piece.size
        found: Gradients = []
        for there, like, own in zip(chunks[0].tolist(), self._dense, parts, strict=True):
            flat = own[0] if len(own) == 1 else torch.cat(own) if own else torch.empty(0, dtype=like.dtype)
            found.append(flat.as_strided(like.shape, like.stride(), flat.storage_offset()) if there else None)
        return found

    def _size(self, c: int) -> int:
        """Number of values in a chunk."""
        return sum(piece.size for piece in self.chunks[c])

    def _dtype(self, c: int) -> torch.dtype:
        return self._like[self.chunks[c][0].parameter].dtype

    def _in_runs(self, chunks: Sequence[int]) -> list[_Run]:
        found: list[_Run] = []
        for c in chunks:
            if c == 0:
                continue
            if not found or found[-1].chunks[-1] != c - 1 or self._dtype(c) != self._dtype(c - 1):
                found.append(_Run([], [], []))
            run = found[-1]
            run.chunks.append(c)
            run.sizes.append(self._size(c))
            for piece in self.chunks[c]:
                if run.pieces and run.pieces[-1].parameter == piece.parameter:
                    run.pieces[-1] = run.pieces[-1]._replace(stop=piece.stop)
                else:
                    run.pieces.append(piece)
        return found

    def _values(self, piece: _Piece, gradient: torch.Tensor | None) -> torch.Tensor:
        """A piece's values: those of a gradient as its parameter's lie in memory."""
        numel, stride = self._laid[piece.parameter]
        if gradient is None:
            return torch.zeros(piece.size, dtype=self._like[piece.parameter].dtype)
        if gradient.stride() != stride:
            gradient = torch.empty_like(self._like[piece.parameter], device=gradient.device).copy_(gradient)
        flat = gradient.as_strided((numel,), (1,))
        return flat if piece.size == numel else flat[piece.start : piece.stop]


def _values(total: int, owners: int) -> int:
    """Number of values in a chunk, if there are so many in all. Messages then need no padding."""
    count = owners * -(-total // (owners * _CHUNK)) if total > owners * _SMALL else 1
    return max(1, -(-total // (count * ALIGN)) * ALIGN)


def chunk_bytes(total: int, owners: int) -> int:
    """Bytes of a chunk of float32 gradients of ``total`` bytes."""
    return 4 * _values(total // 4, owners)


def _ranges(sizes: dict[int, int], most: int) -> list[list[_Piece]]:
    """Parameters of these ``sizes`` one after the other, in ranges of ``most`` values; the last may be shorter."""
    found: list[list[_Piece]] = []
    room = 0
    for n, size in sizes.items():
        at = 0
        while at < size:
            if not room:
                found.append([])
                room = most
            taken = min(room, size - at)
            found[-1].append(_Piece(n, at, at + taken))
            at, room = at + taken, room - taken
    return found
