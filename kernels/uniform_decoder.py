"""Decodes what kernels/uniform.py writes: a module of its own, so that two ranks may compile the halves of the codec."""

import numba as nb
import numpy as np
import numpy.typing as npt
from accept_mpi.kernels.layout import BLOCK, parts
from accept_mpi.kernels.options import INNER, NJIT
from accept_mpi.kernels.unpacking import unpack

_PER_GROUP = 4  # bytes of parameters


@nb.njit("void(uint8[::1], int32, int32, int64, float32[::1], float32[::1], float32[::1])", **INNER)
def _scale(codes, shift, mask, group, zero, scale, x):  # type: ignore[no-untyped-def]
    for g in range(zero.size):
        part = x[g * group : min(g * group + group, x.size)]
        mine = codes[g * group : min(g * group + group, x.size)]
        z, s = zero[g], scale[g]
        for i in range(part.size):
            part[i] = z + s * np.float32(np.int32(np.int32(np.int32(mine[i]) >> shift) & mask))


@nb.njit("void(uint32[::1], uint8[::1], int64, int64, float32[::1], uint8[::1], uint32[:, ::1], float32[:, ::1])", **NJIT)
def _decode(parameters, packed, bits, group, x, codes, scratch, floats):  # type: ignore[no-untyped-def]
    """``floats`` is ``scratch`` (2, groups of a block) as another type: made here, both would take longer to compile."""
    whole = group >= x.size
    zero, scale, zeros, scales = scratch[0], scratch[1], floats[0], floats[1]
    at = 0
    for begin in range(0, x.size, BLOCK):
        block = x[begin : min(begin + BLOCK, x.size)]
        mine = parameters if whole else parameters[begin // group : (begin + block.size + group - 1) // group]
        for g in range(mine.size):
            zero[g] = mine[g] & np.uint32(0xFFFF0000)
            scale[g] = np.uint32(mine[g] << np.uint32(16))
        padded = (block.size + 7) // 8 * 8
        size = padded * bits // 8
        direct = block.size == BLOCK and 8 % bits == 0
        source, streams, mask = packed[at : at + size], 8 // bits, np.int32((1 << bits) - 1)
        if not direct:
            unpack(source, bits, codes[:padded])
            source, streams, mask = codes[:padded], 1, np.int32(255)
        for stream in range(streams):
            first = stream * (block.size // streams)
            part = block[first : first + block.size // streams]
            run, mine_from = min(part.size, group), 0 if whole else first // group
            mine_to = mine_from + (part.size + run - 1) // run
            _scale(source, np.int32(stream * bits), mask, run, zeros[mine_from:mine_to], scales[mine_from:mine_to], part)
        at += size


def decode(data: npt.NDArray[np.uint8], bits: int, group: int, x: npt.NDArray[np.float32]) -> None:
    """Decode the values that ``uniform.encode`` wrote into ``x`` (float32, 1-D, contiguous)."""
    parameters, codes, size = parts(x, data, bits, group, _PER_GROUP, 8)
    numbers = parameters.view(np.uint32)
    scratch = np.empty((2, numbers.size if size >= x.size else BLOCK // size), np.uint32)
    _decode(numbers, codes, bits, size, x, np.empty(BLOCK, np.uint8), scratch, scratch.view(np.float32))
