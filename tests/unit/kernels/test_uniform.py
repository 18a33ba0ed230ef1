"""Uniform quantization: equal to its naive reference bit for bit, within its error bound, unbiased, safe."""

import naive
import numpy as np
import pytest
from accept_mpi.kernels import uniform, uniform_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

GROUPS = (8, 64, 256, 16384, 0)
VALUES = (
    st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-1.0, 1.0, width=32) | st.sampled_from([0.0, -0.0, 1e-45, -1e-40])
)
ARRAYS = hnp.arrays(np.float32, st.integers(0, 200), elements=VALUES)


def there_and_back(x: np.ndarray, bits: int, group: int, key: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros(uniform.encoded_bytes(x.size, bits, group), np.uint8)
    assert uniform.encode(x, bits, group, out, key) == uniform.CODED
    back = np.full_like(x, np.nan)
    uniform_decoder.decode(out, bits, group, back)
    return out, back


@settings(max_examples=200, deadline=None)
@given(ARRAYS, st.integers(1, 8), st.sampled_from(GROUPS), st.none() | st.integers(0, 2**64 - 1))
def test_equals_the_reference_bit_for_bit(x: np.ndarray, bits: int, group: int, key: int | None) -> None:
    out, back = there_and_back(x, bits, group, key)
    data, values = naive.uniform(x, bits, group, key)
    assert out.tobytes() == data
    assert back.tobytes() == values.tobytes()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("size", [1, 63, 64, 65, 16383, 16384, 16385, 40_000])
def test_reference_at_the_edges_of_blocks(bits: int, size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    for group, key in ((64, None), (0, 3 << 40 | 5), (16384, 1 << 33 | 1 << 31)):
        out, back = there_and_back(x, bits, group, key)
        data, values = naive.uniform(x, bits, group, key)
        assert out.tobytes() == data
        assert back.tobytes() == values.tobytes()


def scales(out: np.ndarray, size: int, group: int) -> np.ndarray:
    """The scale of each value's group."""
    groups = -(-size // (group or size))
    words = out[: 4 * groups].view(np.uint32)
    return np.repeat((words << np.uint32(16)).view(np.float32), group or size)[:size]


@settings(max_examples=100, deadline=None)
@given(
    hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-100, 100, width=32)), st.integers(1, 8), st.booleans()
)
def test_error_is_half_a_scale_or_a_scale(x: np.ndarray, bits: int, stochastic: bool) -> None:
    out, back = there_and_back(x, bits, 64, 5 if stochastic else None)
    bound = scales(out, x.size, 64).astype(np.float64) * (1.0 if stochastic else 0.5)
    slack = 1e-5 * np.maximum(np.abs(x), bound) + 3e-36  # float32 arithmetic; ranges below a normal number count as none
    assert (np.abs(x.astype(np.float64) - back) <= bound + slack).all()


def test_stochastic_rounding_is_unbiased() -> None:
    """Over 10^6 draws the mean error is within 4 sigma of zero, at every place between two levels."""
    for fraction in (0.03, 0.25, 0.5, 0.77, 0.999):
        x = np.full(1_000_000, fraction, np.float32)
        x[::64], x[1::64] = 0.0, 15.0  # fixes zero and scale of each group at 0 and 1
        out, back = there_and_back(x, 4, 64, key=99)
        assert set(np.unique(scales(out, x.size, 64))) == {1.0}
        drawn = back[x == np.float32(fraction)]
        sigma = np.sqrt(fraction * (1 - fraction) / drawn.size)
        assert abs(drawn.mean() - fraction) < 4 * sigma


def test_tiny_scales_equal_the_reference() -> None:
    """1 / scale times 65,536 is beyond float32."""
    x = np.arange(64, dtype=np.float32) * np.float32(3e-37)
    for bits, key in ((4, None), (4, 7), (8, 7)):
        out, back = there_and_back(x, bits, 64, key)
        data, values = naive.uniform(x, bits, 64, key)
        assert out.tobytes() == data
        assert back.tobytes() == values.tobytes()
        assert np.unique(back).size > 8


def test_random_bits_come_from_the_key_alone() -> None:
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    a, b, c = (there_and_back(x, 3, 64, key)[0] for key in (1, 1, 2))
    assert a.tobytes() == b.tobytes()
    assert a.tobytes() != c.tobytes()
    high = there_and_back(x, 3, 64, 1 << 40)[0]
    assert high.tobytes() != there_and_back(x, 3, 64, 0)[0].tobytes()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_coded(value: float) -> None:
    for place in (0, 77, 4999):
        x = np.ones(5000, np.float32)
        x[place] = value
        for group in GROUPS:
            out = np.zeros(uniform.encoded_bytes(x.size, 4, group), np.uint8)
            assert uniform.encode(x, 4, group, out) == uniform.NOT_FINITE


def test_extremes_of_float32() -> None:
    big = np.float32(3.4e38)
    out = np.zeros(uniform.encoded_bytes(8, 4, 8), np.uint8)
    assert uniform.encode(np.array([big, -big] * 4), 4, 8, out) == uniform.TOO_LARGE
    for bits in range(1, 9):  # each value is finite, the highest level that decodes to it may not be
        for least in (0.0, 1e38, -1e38):
            x = np.linspace(least, float(big), 64).astype(np.float32)
            out, back = np.zeros(uniform.encoded_bytes(64, bits, 64), np.uint8), np.empty(64, np.float32)
            if uniform.encode(x, bits, 64, out) == uniform.CODED:
                uniform_decoder.decode(out, bits, 64, back)
                assert np.isfinite(back).all(), (bits, least)
    for constant in (0.0, 1.2345, -7e-3, 1e38, 1e-42):
        _, back = there_and_back(np.full(100, constant, np.float32), 2, 64)
        assert np.allclose(back, constant, rtol=2**-7, atol=1e-37)
    assert there_and_back(np.zeros(0, np.float32), 4, 64)[1].size == 0
    assert there_and_back(np.zeros(100, np.float32), 1, 0)[1].any() == np.False_


def test_bits_on_the_wire() -> None:
    """No bit is wasted: 3 bits are 3 bits."""
    for bits in range(1, 9):
        assert uniform.encoded_bytes(4096, bits, 64) == 4096 * bits // 8 + 4 * 64
        assert uniform.encoded_bytes(4096, bits, 0) == 4096 * bits // 8 + 4


def test_wrong_arguments() -> None:
    x, out = np.zeros(64, np.float32), np.zeros(36, np.uint8)
    for wrong, arguments in {
        "contiguous 1-D float32": (np.zeros(64), 4, 64, out),
        "bits must be": (x, 9, 64, out),
        "power of two": (x, 4, 48, out),
        "take 36 bytes, got 35": (x, 4, 64, out[:35]),
    }.items():
        with pytest.raises(ValueError, match=wrong):
            uniform.encode(*arguments)
