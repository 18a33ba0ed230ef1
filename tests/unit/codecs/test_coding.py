"""Codecs by name, and coded messages: right, an error, or uncoded with a note, never laundered."""

import numpy as np
import pytest
import torch
from test_message import LABEL, now

from accept_mpi.codecs.coding import NONE, Coding, parse
from accept_mpi.codecs.message import HEADER_BYTES, aligned, as_decoded, buffer_bytes, decode, encode, wire_bytes
from accept_mpi.codecs.tensors import TensorSpec
from accept_mpi.errors import ProtocolError

NAMES = ("bf16", "fp16", "uniform:4", "uniform:3/256+sr", "uniform:1", "uniform:8/0+nr", "mbq:2", "mbq:3/0", "entropy:4.5")


def test_names() -> None:
    assert parse("none", False) == NONE
    assert parse("uniform:4", False) == Coding("uniform", 4, 64, False)
    assert parse("uniform:4", True) == Coding("uniform", 4, 64, True)
    assert parse("uniform:2/256+sr", False) == Coding("uniform", 2, 256, True)
    assert parse("uniform:2/0+nr", True) == Coding("uniform", 2, 0, False)
    assert parse("mbq:2", True) == Coding("mbq", 2, 64, False)
    assert parse("mbq:1/0", False) == Coding("mbq", 1, 0, False)
    assert parse("entropy:4.5", False) == Coding("entropy", 4.5, 0, False)
    assert parse("entropy:3", True) == Coding("entropy", 3, 0, True)
    assert parse("entropy:2.25+nr", True) == Coding("entropy", 2.25, 0, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unifrom:4", 'unknown codec "unifrom:4"; did you mean "uniform"'),
        ("uniform:9", "1 to 8 bits, not 9"),
        ("uniform:4/48", "power of two from 8 to 16384"),
        ("uniform:4+xx", "unknown codec"),
        ("mbq:5", "1 to 4 bits, not 5"),
        ("mbq:2+sr", "always takes the nearest level"),
        ("uniform", "unknown codec"),
        ("uniform:4.5", "unknown codec"),
        ("entropy:1.2", "1.5 to 10 bits, not 1.2"),
        ("entropy:4/64", "unknown codec"),
        ("entorpy:4", 'did you mean "entropy"'),
    ],
)
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(name, False)


def message(coding: Coding, *tensors: torch.Tensor, key: int = 0) -> tuple[dict, np.ndarray]:
    specs = tuple(TensorSpec.of(t) for t in tensors)
    buffer = aligned(buffer_bytes(specs, coding))
    flat = tuple(spec.flatten(t) for spec, t in zip(specs, tensors, strict=True))
    header = encode(LABEL, specs, flat, buffer, coding, key, now=now)
    return {4: specs}, buffer[: HEADER_BYTES + header.length]


@pytest.mark.parametrize("name", NAMES)
def test_coded_tuples_of_any_dtype(name: str) -> None:
    coding = parse(name, False)
    image = torch.randn(4, 3, 6, 5).contiguous(memory_format=torch.channels_last)
    tensors = (
        image, torch.arange(7), torch.randn(9).double(), torch.randn(5).bfloat16(), torch.randn(5).half(),
        torch.randn(0, 2), torch.randn(1), torch.tensor([True, False]), torch.randn(4, 1).expand(4, 8),
        torch.randn(8, 8)[::2],
    )  # fmt: skip
    specs, data = message(coding, *tensors)
    assert data.size == wire_bytes(specs[4], coding)
    header, back, *_ = decode(specs, data, coding)
    assert header.codec == coding.number
    for tensor, result in zip(tensors, back, strict=True):
        assert result is not None
        assert (result.shape, result.dtype) == (tensor.shape, tensor.dtype)
        if not tensor.is_floating_point():
            assert torch.equal(result, tensor)
        elif tensor.numel():
            spread = float(tensor.max() - tensor.min())
            step = spread / (2**coding.bits - 1) if coding.bits else float(tensor.abs().max()) / 256
            step = 2 * spread if coding.kind == "mbq" else step  # mbq bounds no single error
            step = 3 * step if coding.kind == "entropy" else step  # a table takes some of few bytes
            # Half a step to nearest, a whole one stochastically; zero point and scale are bfloat16, right to 1/128.
            bound = step * (1.0 if coding.stochastic else 0.5) + float(tensor.abs().max()) / 64
            assert (result - tensor).abs().max() <= bound
    assert back[0] is not None
    assert back[0].stride() == image.stride()


def test_half_precision_is_torchs() -> None:
    x = torch.cat([torch.randn(1000) * 10.0 ** torch.randint(-30, 4, (1000,)), torch.tensor([0.0, -0.0, 1e-45])])
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        specs, data = message(parse(name, False), x)
        assert torch.equal(decode(specs, data, parse(name, False))[1][0], x.to(dtype).float())


@pytest.mark.parametrize("name", ["fp16", "uniform:4", "uniform:8/0", "uniform:2+sr", "entropy:4.5"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_goes_uncoded(name: str, value: float) -> None:
    coding, x = parse(name, False), torch.randn(100)
    x[50] = value
    specs, data = message(coding, torch.randn(10), x)
    header, back, *_ = decode(specs, data, coding)
    assert header.codec == 0
    assert back[1] is not None
    assert torch.equal(back[1].nan_to_num(nan=7.5), x.nan_to_num(nan=7.5))


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5, 1e-7, 1e-12, 1e-36])
def test_fp16_keeps_small_gradients(size: float) -> None:
    """Half precision alone rounds those below 6e-5 to few bits, and those below 6e-8 to nothing."""
    coding, x = parse("fp16", True), torch.randn(1000) * size
    (back,) = decode(*message(coding, x), coding)[1]
    assert back is not None
    assert (back - x).double().norm() < 1e-3 * x.double().norm()
    known = as_decoded(x, coding)
    assert known is not None
    assert torch.equal(known, back)


def test_fp16_does_not_make_infinities() -> None:
    specs, data = message(parse("fp16", False), torch.tensor([1e5]))
    assert decode(specs, data, parse("fp16", False))[1][0] == 1e5


def test_bf16_carries_what_is_not_finite() -> None:
    x = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 3.389e38])
    specs, data = message(parse("bf16", False), x)
    header, (back,), *_ = decode(specs, data, parse("bf16", False))
    assert header.codec == parse("bf16", False).number
    assert back is not None
    assert torch.equal(back.nan_to_num(nan=1.5), x.bfloat16().float().nan_to_num(nan=1.5))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_finite_stays_finite(name: str, dtype: torch.dtype) -> None:
    """At the ends of a type, too, as in an attention mask; coded or, where the codec has no code for it, as it is."""
    coding, most = parse(name, False), torch.finfo(dtype).max
    torch.manual_seed(0)
    for values in (
        torch.tensor([0.0, -most] * 50, dtype=dtype),
        torch.tensor([0.0, most] * 50, dtype=dtype),
        torch.tensor([3.39e38, 1.0] * 50, dtype=torch.float64).clamp(max=most).to(dtype),
        *(most * (share + (1 - share) * torch.rand(100, dtype=dtype)) for share in (0.0, 0.5, 0.9)),
        *(-most * (share + (1 - share) * torch.rand(100, dtype=dtype)) for share in (0.0, 0.5, 0.9)),
    ):
        (back,) = decode(*message(coding, values, key=3), coding)[1]
        assert back is not None
        assert back.isfinite().all(), values[~back.isfinite()]
        known = as_decoded(values, coding)
        assert known is None or known.isfinite().all()


def test_same_key_same_bytes() -> None:
    coding, x = parse("uniform:3+sr", False), torch.randn(500)
    assert message(coding, x, key=5)[1].tobytes() == message(coding, x, key=5)[1].tobytes()
    assert message(coding, x, key=5)[1].tobytes() != message(coding, x, key=6)[1].tobytes()
    specs, data = message(coding, x, x, key=5)
    first, second = decode(specs, data, coding)[1]
    assert not torch.equal(first, second), "two tensors of a message draw their own"


def test_another_codec_than_agreed_is_refused() -> None:
    specs, data = message(parse("bf16", False), torch.randn(10))
    with pytest.raises(ProtocolError, match="codec bf16 where fp16 was agreed"):
        decode(specs, data, parse("fp16", False))
    with pytest.raises(ProtocolError, match="codec bf16 where none was agreed"):
        decode(specs, data)


def test_100_000_damaged_messages_are_errors() -> None:
    """Any changed, cut or lengthened message is refused; nothing is read or written out of bounds."""
    rng = np.random.default_rng(3)
    originals = []
    for name in ("none", *NAMES):
        coding = parse(name, False)
        originals.append((coding, *message(coding, torch.arange(70.0), torch.arange(3))))
    for number in range(100_000):
        coding, specs, data = originals[number % len(originals)]
        how = number // len(originals) % 4
        if how == 0:  # some bytes changed
            damaged = data.copy()
            damaged[rng.integers(0, data.size, rng.integers(1, 4))] ^= np.uint8(rng.integers(1, 256))
        elif how == 1:  # cut off
            damaged = data[: rng.integers(0, data.size)].copy()
        elif how == 2:  # longer
            damaged = np.concatenate([data, rng.integers(0, 256, rng.integers(1, 80), np.uint8)])
        else:  # noise behind a right magic number
            damaged = np.concatenate([data[:5], rng.integers(0, 256, rng.integers(0, 300), np.uint8)])
        if damaged.tobytes() == data.tobytes():
            continue
        try:
            decode(specs, damaged, coding)
        except ProtocolError:
            continue
        pytest.fail(f"message {number} was damaged ({how}) and believed")


@pytest.mark.parametrize(
    "name",
    [*(f"uniform:{bits}" for bits in range(1, 9)), *(f"mbq:{bits}" for bits in range(1, 5)), "entropy:1.5", "entropy:10"],
)
def test_garbage_behind_a_right_checksum_stays_within_its_bounds(name: str) -> None:
    """Any bytes of the right length decode to some values, and to nothing outside of them."""
    rng = np.random.default_rng(5)
    for group in ("/8", "", "/0") if name[0] != "e" else ("",):
        coding = parse(name + group, False)
        for size in (1, 65, 16384 + 65):
            for _ in range(10):
                room = np.full(size + 128, 7.0, np.float32)
                coding.decode(rng.integers(0, 256, coding.nbytes(size), np.uint8), room[64 : 64 + size])
                assert (room[:64] == 7).all()
                assert (room[64 + size :] == 7).all()


@pytest.mark.parametrize("codec", ["bf16", "fp16", "uniform:8", "entropy:8"])
def test_doubles_beyond_single_precision_go_as_they_are(codec: str) -> None:
    x = torch.tensor([1.0, -3e300, 2.0] * 20, dtype=torch.float64)
    coding = parse(codec, gradients=False)
    header, (back,), *_ = decode(*message(coding, x), coding)
    assert header.codec == NONE.number
    assert back is not None
    assert torch.equal(back, x)
