"""Kernels against their naive references."""

import naive
import numpy as np
import pytest
from accept_mpi.kernels import checksum
from hypothesis import given
from hypothesis import strategies as st


@given(st.binary(max_size=300))
def test_checksum_equals_reference(data: bytes) -> None:
    array = np.frombuffer(data, np.uint8).copy()
    assert checksum(array) == naive.checksum(array)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_checksum_sees_every_changed_byte_and_length(data: bytes, draw: st.DataObject) -> None:
    array = np.frombuffer(data, np.uint8).copy()
    before = checksum(array)
    at = draw.draw(st.integers(0, len(data) - 1))
    changed = array.copy()
    changed[at] ^= draw.draw(st.integers(1, 255))
    assert checksum(changed) != before
    assert checksum(array[:-1].copy()) != before
    assert checksum(np.append(array, np.uint8(0))) != before


def test_checksum_sees_swapped_words() -> None:
    array = np.arange(64, dtype=np.uint32)
    swapped = array.copy()
    swapped[[3, 40]] = swapped[[40, 3]]
    assert checksum(array.view(np.uint8)) != checksum(swapped.view(np.uint8))


def test_checksum_refuses_other_arrays() -> None:
    for wrong in (np.zeros(4, np.float32), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2]):
        with pytest.raises(ValueError, match="contiguous 1-D uint8"):
            checksum(wrong)
