"""Multi-bit quantization: equal to its naive reference bit for bit, better than its greedy start, safe."""

import naive
import numpy as np
import pytest
from accept_mpi.kernels import mbq, uniform, uniform_decoder
from accept_mpi.kernels.groups import CODED, NOT_FINITE, TOO_LARGE
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

VALUES = (
    st.floats(-(2.0**100), 2.0**100, width=32)
    | st.floats(-1.0, 1.0, width=32)
    | st.sampled_from([0.0, -0.0, 1e-45, 1.0, 2.0])
)


def there_and_back(x: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros(mbq.encoded_bytes(x.size, bits, group), np.uint8)
    assert mbq.encode(x, bits, group, out) == CODED
    back = np.full_like(x, np.nan)
    mbq.decode(out, bits, group, back)
    return out, back


def error(x: np.ndarray, back: np.ndarray) -> float:
    return float(np.square(x - back, dtype=np.float64).sum() / np.square(x, dtype=np.float64).sum())


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, st.integers(0, 200), elements=VALUES), st.integers(1, 4), st.sampled_from((8, 64, 16384, 0)))
def test_equals_the_reference_bit_for_bit(x: np.ndarray, bits: int, group: int) -> None:
    out, back = there_and_back(x, bits, group)
    data, values = naive.mbq(x, bits, group)
    assert out.tobytes() == data
    assert back.tobytes() == values.tobytes()


@pytest.mark.parametrize("bits", range(1, 5))
@pytest.mark.parametrize("size", [16383, 16384, 16393, 40_000])
def test_reference_at_the_edges_of_blocks(bits: int, size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    for group in (64, 256, 0):
        out, back = there_and_back(x, bits, group)
        data, values = naive.mbq(x, bits, group)
        assert out.tobytes() == data
        assert back.tobytes() == values.tobytes()


def test_error_is_that_of_the_paper_on_normal_values() -> None:
    """Whole-tensor alternating MBQ of normal values: .119 at 2 bits, .021 at 4 (with exact least squares)."""
    x = np.random.default_rng(1).standard_normal(200_000).astype(np.float32)
    for bits, expected in ((1, 0.363), (2, 0.119), (4, 0.021)):
        assert error(x, there_and_back(x, bits, 0)[1]) < 1.1 * expected


def test_loses_less_than_uniform_at_one_and_two_bits_and_more_at_four() -> None:
    x = np.random.default_rng(1).standard_normal(100_000).astype(np.float32)
    for bits in (1, 2, 4):
        out, back = np.zeros(uniform.encoded_bytes(x.size, bits, 64), np.uint8), np.empty_like(x)
        assert uniform.encode(x, bits, 64, out) == CODED
        uniform_decoder.decode(out, bits, 64, back)
        ratio = error(x, there_and_back(x, bits, 64)[1]) / error(x, back)
        assert ratio < 0.7 if bits < 4 else ratio > 1.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_coded(value: float) -> None:
    for place in (0, 77, 39_999):
        x = np.ones(40_000, np.float32)
        x[place] = value
        for group in (64, 0):
            out = np.zeros(mbq.encoded_bytes(x.size, 2, group), np.uint8)
            assert mbq.encode(x, 2, group, out) == NOT_FINITE


def test_extremes_of_float32() -> None:
    big = np.float32(3.4e38)
    for x in (np.array([big, -big] * 4), np.array([0, big] * 4, np.float32)):
        out = np.zeros(mbq.encoded_bytes(8, 2, 8), np.uint8)
        assert mbq.encode(x.astype(np.float32), 2, 8, out) == TOO_LARGE
    for constant in (0.0, 1.2345, -7e-3, 1e36, 1e-42):
        _, back = there_and_back(np.full(100, constant, np.float32), 2, 64)
        assert np.allclose(back, constant, rtol=2**-8, atol=1e-37)
    assert there_and_back(np.zeros(0, np.float32), 3, 64)[1].size == 0


def test_wrong_arguments() -> None:
    x, out = np.zeros(64, np.float32), np.zeros(22, np.uint8)
    for wrong, arguments in {
        "contiguous 1-D float32": (np.zeros(64), 2, 64, out),
        "bits must be 1..4": (x, 5, 64, out),
        "power of two": (x, 2, 48, out),
        "take 22 bytes, got 21": (x, 2, 64, out[:21]),
    }.items():
        with pytest.raises(ValueError, match=wrong):
            mbq.encode(*arguments)
