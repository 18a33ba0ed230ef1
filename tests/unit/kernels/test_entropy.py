"""Entropy-coded values: what a naive decoder reads, within half a step of what was written, in bytes known beforehand."""

import naive
import numpy as np
import pytest
from accept_mpi.kernels import entropy, uniform, uniform_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

VALUES = (
    st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-1.0, 1.0, width=32) | st.sampled_from([0.0, -0.0, 1e-45, -1e-40])
)
ARRAYS = hnp.arrays(np.float32, st.integers(0, 200), elements=VALUES)
SIZES = st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 0.1, 1.0, 1.5, 1e3]), min_size=16, max_size=40)
BITS = (1.5, 2.5, 4.0, 4.5, 7.3, 10.0)


def there_and_back(x: np.ndarray, bits: float, key: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    out = np.full(entropy.encoded_bytes(x.size, bits), 255, np.uint8)
    assert entropy.encode(x, bits, 0, out, key) == entropy.CODED
    back = np.full_like(x, np.nan)
    entropy.decode(out, bits, 0, back)
    return out, back


def check(x: np.ndarray, bits: float, key: int | None) -> None:
    out, back = there_and_back(x, bits, key)
    assert naive.entropy(out.tobytes(), x.size).tobytes() == back.tobytes()
    step, offset = out[:8].view(np.float32)
    bound = float(step) * (0.5 if key is None else 1.0)
    near = 1e-5 * max(np.abs(x).max(), abs(float(offset))) + 2e-30
    assert (np.abs(x.astype(np.float64) - back) <= bound * 1.001 + near).all()


@settings(max_examples=200, deadline=None)
@given(ARRAYS.filter(len), st.sampled_from(BITS), st.none() | st.integers(0, 2**64 - 1))
def test_a_naive_decoder_reads_the_same(x: np.ndarray, bits: float, key: int | None) -> None:
    check(x, bits, key)


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(0, 63), st.sampled_from(BITS), st.none() | st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_a_naive_decoder_reads_blocks_of_unlike_size(
    sizes: list[float], more: int, bits: float, key: int | None, seed: int
) -> None:
    x = np.random.default_rng(seed).standard_normal((len(sizes), 64)) * np.array(sizes)[:, None]
    check(np.concatenate([x.ravel(), np.ones(more)]).astype(np.float32), bits, key)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "half zeros", "far from zero", "one outlier"])
def test_distributions(kind: str, bits: float) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(5001)
    x = {
        "normal": x, "heavy tails": x * np.exp(3 * rng.standard_normal(5001)), "half zeros": np.maximum(x, 0),
        "far from zero": x + 1e4, "one outlier": np.where(np.arange(5001) == 4000, 1e6, x),
    }[kind]  # fmt: skip
    check(x.astype(np.float32), bits, None)
    check(x.astype(np.float32), bits, 7)


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_better_than_even_bits_in_as_many_bytes(bits: int) -> None:
    """Of normal values the error is 0.22, 0.35 and 0.44 of ``uniform``'s."""
    x = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    out, back = there_and_back(x, bits + 0.5)
    plain, other = np.zeros(uniform.encoded_bytes(x.size, bits, 64), np.uint8), np.empty_like(x)
    uniform.encode(x, bits, 64, plain)
    uniform_decoder.decode(plain, bits, 64, other)
    assert out.size == plain.size
    assert np.square(x - back).mean() < {2: 0.25, 4: 0.38, 6: 0.48}[bits] * np.square(x - other).mean()


def test_the_bytes_are_used() -> None:
    """Near to the error that an ideal code reaches in these bytes: variance * 2 pi e / 12 * 4 ** -bits."""
    x = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    for bits in 3.5, 4.5, 6.5:
        _, back = there_and_back(x, bits)
        assert np.square(x - back).mean() < 1.06 * 2 * np.pi * np.e / 12 * 4.0**-bits


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "rows", "half zeros"])
@pytest.mark.parametrize("key", [None, 7])
def test_no_short_message_is_coarse(kind: str, key: int | None) -> None:
    """A few hundred values tell little of how many bits another step takes: errors were up to eight times as large."""
    rng = np.random.default_rng(1)
    for values in (200, 500, 1024, 2304, 5000) * 50:
        x = rng.standard_t(2, values) if kind == "heavy tails" else rng.standard_normal(values)
        if kind == "rows":
            x *= np.repeat(np.exp(2 * rng.standard_normal(values // 32 + 1)), 32)[:values]
        elif kind == "half zeros":
            x = np.maximum(x, 0)
        bits = (2.0, 2.5, 3.0, 4.5, 6.0, 8.0)[rng.integers(6)]
        error, coarser = (np.square(x - there_and_back(x.astype(np.float32), r, key)[1]).mean() for r in (bits, bits - 0.4))
        assert error < 1.6 * coarser, (values, bits)


@pytest.mark.parametrize("values", [1 << 12, 1 << 14, 1 << 16])
@pytest.mark.parametrize("seed", range(4))
def test_the_bytes_are_used_where_rows_are_of_unlike_size(seed: int, values: int) -> None:
    """A sample alone is off by a fifth of a bit a value there."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((values // 64, 64)) * np.exp(rng.standard_normal((values // 64, 1)))
    for bits, key in (4.5, None), (3.5, 7):
        out, _ = there_and_back(rows.ravel().astype(np.float32), bits, key)
        assert out.size - np.flatnonzero(out)[-1] < 0.015 * values / 8 + 24  # of these up to 16 are in the states


@pytest.mark.parametrize("key", [None, 7])
def test_tables_that_would_not_fit(key: int | None) -> None:
    """Two classes with values of every size: their tables alone took 199 of 192 bytes, and what was decoded were NaN."""
    rng = np.random.default_rng(27)
    x = rng.standard_normal((16, 64)) * rng.permuted(np.repeat([1e-3, 1.0], 8))[:, None]
    for factor in np.exp2(np.arange(-2, 2, 0.1)):
        x[:, 17], x[:, 19] = 16383 * factor, -16383 * factor  # where no sample looks
        check(x.ravel().astype(np.float32), 1.5, key)


def rows_of_unlike_size(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((256, 64)) * np.exp(1.5 * rng.standard_normal((256, 1)))).astype(np.float32).ravel()


@pytest.mark.parametrize("bits", [2, 3, 4.5])
def test_blocks_of_unlike_size_are_coded_by_classes(bits: float) -> None:
    """Each with the probabilities of its size: 30 to 60 % less square error than in any other order."""
    x = rows_of_unlike_size()
    mixed = np.random.default_rng(1).permutation(x)
    for key in None, 7:
        (out, back), (_, other) = there_and_back(x, bits, key), there_and_back(mixed, bits, key)
        assert out[48] & 15 > 1
        assert np.square(x - back).mean() < 0.7 * np.square(mixed - other).mean()


def test_classes_have_dither_or_not() -> None:
    """Tokens whose gradients are a small part of a step are mostly zero, and get no noise of a whole step."""
    x = rows_of_unlike_size().reshape(-1, 64)
    x[::2] *= 1e-3
    out, back = there_and_back(x.ravel(), 2.0, 7)
    step = float(out[:4].view(np.float32)[0])
    errors = np.square((x - back.reshape(x.shape)) / step)
    assert out[48] >> 4 not in (0, (1 << (out[48] & 15)) - 1)
    assert errors[::2].mean() < 0.02
    assert errors.mean() < min(0.9 / 12, np.mean(errors[1::2]))


def test_stochastic_rounding_is_unbiased() -> None:
    x = np.linspace(-2, 2, 200_000, dtype=np.float32)
    sums = np.zeros(x.size)
    for key in range(40):
        out, back = there_and_back(x, 3.0, key << 32 | key)
        sums += back - x
    step = float(out[:4].view(np.float32)[0])
    assert abs(sums.mean() / 40) < 4 * step / np.sqrt(6 * 40 * x.size)
    assert np.abs(sums / 40).max() < 6 * step / np.sqrt(4 * 40)


@pytest.mark.parametrize("bits", [1.5, 2, 3, 4.5])
def test_dither_halves_the_square_error(bits: float) -> None:
    """1/12 of a step's square, as of rounding to nearest; of stochastic rounding alone it is 1/6."""
    x = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    out, back = there_and_back(x, bits, 12345)
    step = float(out[:4].view(np.float32)[0])
    assert 0.98 < 12 * np.square((x - back) / step).mean() < 1.02
    assert abs(np.corrcoef(x, x - back)[0, 1]) < 0.02  # as nothing that depends on x


def test_no_dither_where_it_would_add_noise() -> None:
    """Where few values are not zero, zeros stay zero."""
    rng = np.random.default_rng(0)
    x = np.where(rng.random(1 << 14) < 0.1, rng.standard_normal(1 << 14), 0).astype(np.float32)
    out, back = there_and_back(x, 2.0, 12345)
    assert (back[x == 0] == 0).all()
    assert abs((x - back).sum()) < 6 * float(out[:4].view(np.float32)[0]) / 2 * np.sqrt((x != 0).sum())


def test_random_bits_come_from_the_key_alone() -> None:
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    one, same, other, high = (there_and_back(x, 3.0, key)[0].tobytes() for key in (1, 1, 2, 1 << 40 | 1))
    assert one == same
    assert len({one, other, high}) == 3


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_coded(value: float) -> None:
    for place in (0, 77, 4999):
        x = np.ones(5000, np.float32)
        x[place] = value
        assert entropy.encode(x, 4.5, 0, np.zeros(entropy.encoded_bytes(x.size, 4.5), np.uint8)) == entropy.NOT_FINITE


def test_extremes_of_float32() -> None:
    out = np.zeros(entropy.encoded_bytes(8, 4.0), np.uint8)
    assert entropy.encode(np.array([3.4e38, -3.4e38] * 4, np.float32), 4.0, 0, out) == entropy.TOO_LARGE
    for constant in (0.0, 1.2345, -7e-3, 1e36, 1e-42):
        assert (there_and_back(np.full(100, constant, np.float32), 1.5)[1] == np.float32(constant)).all()
    assert there_and_back(np.zeros(0, np.float32), 4.5)[1].size == 0


def test_bits_on_the_wire() -> None:
    assert entropy.encoded_bytes(4096, 4.5) == 4096 * 4.5 / 8
    assert entropy.encoded_bytes(1, 4.5) == entropy.encoded_bytes(220, 4.5) == 128
    assert entropy.encoded_bytes(0, 4.5) == 0


def test_wrong_arguments() -> None:
    x, out = np.zeros(64, np.float32), np.zeros(128, np.uint8)
    for wrong, arguments in {
        "contiguous 1-D float32": (np.zeros(64), 4, 0, out),
        "bits must be": (x, 11, 0, out),
        "take 128 bytes, got 127": (x, 4, 0, out[:127]),
    }.items():
        with pytest.raises(ValueError, match=wrong):
            entropy.encode(*arguments)
