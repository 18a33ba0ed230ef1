"""Decodes what kernels/uniform.py writes: a module of its own, so that two ranks may compile the halves of the codec."""

import numba as nb
import numpy as np
import numpy.typing as npt
from accept_mpi.kernels.layout import BLOCK, parts
from accept_mpi.kernels.options import INNER, NJIT, U
from accept_mpi.kernels.unpacking import unpack

_PER_GROUP = 4  # bytes of parameters


@nb.njit(
    "void(uint8[::1], uint64, int32, int32, uint64, float32[::1], float32[::1], uint64, float32[::1], uint64, uint64)",
    **INNER,
)
def _scale(codes, at, shift, mask, run, zero, scale, group, x, begin, end):  # type: ignore[no-untyped-def]
    """Values ``begin`` to ``end`` - 1 of ``x`` from the codes at ``codes[at]``; with each ``run`` a new group begins."""
    for first in range(begin, end, run):
        z, s = zero[group], scale[group]
        for i in range(min(run, end - first)):
            x[first + i] = z + s * np.float32(np.int32(np.int32(np.int32(codes[at + i]) >> shift) & mask))
        group += U(1)
        at += run


@nb.njit("void(uint32[::1], uint8[::1], int64, uint64, float32[::1], uint8[::1], uint32[:, ::1], float32[:, ::1])", **NJIT)
def _decode(parameters, packed, bits, group, x, codes, scratch, floats):  # type: ignore[no-untyped-def]
    """``floats`` is ``scratch`` (2, groups of a block) as another type: made here, both would take longer to compile."""
    zero, scale, zeros, scales = scratch[0], scratch[1], floats[0], floats[1]
    n, at = U(x.size), U(0)
    whole = group >= n
    for begin in range(U(0), n, U(BLOCK)):
        end = min(begin + U(BLOCK), n)
        first = U(0) if whole else begin // group
        for g in range(U(1) if whole else (end - begin + group - U(1)) // group):
            zero[g] = parameters[first + g] & np.uint32(0xFFFF0000)
            scale[g] = parameters[first + g] << np.uint32(16)
        if end - begin == U(BLOCK) and 8 % bits == 0:  # each plane is a stream of codes
            size, mask = U(BLOCK * bits // 8), np.int32((1 << bits) - 1)
            for stream in range(U(8 // bits)):
                place = stream * size
                mine = U(0) if whole else place // group
                run, value = min(size, group), begin + place
                _scale(packed, at, np.int32(stream * U(bits)), mask, run, zeros, scales, mine, x, value, value + size)
            at += size
        else:
            at = unpack(packed, at, bits, codes, (end - begin + U(7)) & ~U(7))
            _scale(codes, U(0), np.int32(0), np.int32(255), group, zeros, scales, U(0), x, begin, end)


def decode(data: npt.NDArray[np.uint8], bits: int, group: int, x: npt.NDArray[np.float32]) -> None:
    """Decode the values that ``uniform.encode`` wrote into ``x`` (float32, 1-D, contiguous)."""
    parameters, codes, size = parts(x, data, bits, group, _PER_GROUP, 8)
    numbers = parameters.view(np.uint32)
    scratch = np.empty((2, numbers.size if size >= x.size else BLOCK // size), np.uint32)
    _decode(numbers, codes, bits, size, x, np.empty(BLOCK, np.uint8), scratch, scratch.view(np.float32))
