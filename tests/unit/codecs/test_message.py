"""The wire: any layout and dtype comes back as it went, and nothing malformed is believed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accept_mpi.codecs import message
from accept_mpi.codecs.coding import NONE, Bytes, parse
from accept_mpi.codecs.message import (
    HEADER_BYTES,
    Decoded,
    Header,
    Label,
    aligned,
    announced,
    as_decoded,
    buffer_bytes,
    decode,
    describe,
    encode,
    wire_bytes,
)
from accept_mpi.codecs.tensors import TensorSpec
from accept_mpi.direction import Direction
from accept_mpi.errors import ProtocolError
from accept_mpi.tree import flatten, unflatten

LABEL = Label(direction=0, boundary=1, step=7, micro_batch=3, samples=4)


def now() -> float:
    return 1.5


def there_and_back(*tensors: torch.Tensor | None) -> tuple[Header, tuple[torch.Tensor | None, ...]]:
    specs = tuple(TensorSpec.of(t) for t in tensors)
    buffer = aligned(wire_bytes(specs))
    flat = tuple(spec.flatten(t) for spec, t in zip(specs, tensors, strict=True))
    assert HEADER_BYTES + encode(LABEL, specs, flat, buffer, now=now).length == buffer.size
    return decode({4: specs}, buffer)[:2]


LAYOUTS = {
    "contiguous": torch.randn(4, 3, 5, 6),
    "channels_last": torch.randn(4, 3, 5, 6).contiguous(memory_format=torch.channels_last),
    "transposed": torch.randn(6, 5).t(),
    "expanded": torch.randn(4, 3, 1, 1).expand(4, 3, 5, 6),
    "expanded scalar": torch.tensor(2.5).expand(4, 3),
    "with gaps": torch.randn(8, 8)[::2, 1:5],
    "one element": torch.randn(1, 1),
    "scalar": torch.tensor(3.0),
    "empty": torch.randn(0, 3),
    "int64": torch.arange(12).reshape(3, 4),
    "bool": torch.tensor([True, False, True]),
    "bfloat16": torch.randn(7).bfloat16(),
    "float16": torch.randn(7).half(),
    "float64": torch.randn(7).double(),
    "not finite": torch.tensor([np.nan, np.inf, -np.inf, -0.0, 1e-45]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_keeps_values_and_strides(name: str) -> None:
    tensor = LAYOUTS[name]
    header, (back,) = there_and_back(tensor)
    assert back is not None
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.reshape(-1).contiguous().view(torch.uint8).equal(tensor.reshape(-1).contiguous().view(torch.uint8))
    assert back.nan_to_num(nan=7.0).equal(tensor.nan_to_num(nan=7.0))
    assert back.stride() == tensor.stride()
    assert (header.step, header.micro_batch, header.samples) == (7, 3, 4)


@given(
    st.sampled_from(["bf16", "fp16", "uniform:8", "uniform:4", "uniform:2", "mbq:2", "entropy:4.5"]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8]),
    st.one_of(st.integers(1, 40), st.sampled_from([1000, 5000])),
    st.sampled_from([1.0, 1e39, float("inf")]),
)
@settings(max_examples=200, deadline=None)
def test_what_a_receiver_decodes_is_known_beforehand(name: str, dtype: torch.dtype, size: int, largest: float) -> None:
    """Whoever sums a group's gradients goes on with what the others decode: of any dtype, and however few."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    values[0] *= largest
    tensor, coding = (values * 9).to(dtype) if dtype.is_floating_point else values.abs().to(dtype), parse(name, False)
    specs = (TensorSpec.of(tensor),)
    buffer = aligned(buffer_bytes(specs, coding))
    header = encode(LABEL, specs, (specs[0].flatten(tensor),), buffer, coding, 12345, now=now)
    (back,) = decode({4: specs}, buffer[: HEADER_BYTES + header.length], coding).tensors
    expected = as_decoded(tensor, coding)
    expected = tensor if expected is None else expected
    assert back is not None
    assert back.dtype == expected.dtype
    assert back.view(torch.uint8).equal(expected.view(torch.uint8))


def test_tuples_with_absent_gradients() -> None:
    a, b = torch.randn(3, 3), torch.arange(5)
    _, back = there_and_back(a, None, b)
    assert back[1] is None
    assert back[0] is not None
    assert back[0].equal(a)
    assert back[2] is not None
    assert back[2].equal(b)


def test_expanded_gradients_cross_once() -> None:
    assert TensorSpec.of(LAYOUTS["expanded"]).nbytes == 4 * 3 * 4


def test_gradient_marks_cross() -> None:
    _, (back,) = there_and_back(torch.randn(3, requires_grad=True))
    assert back is not None
    assert back.requires_grad
    assert back.is_leaf


@pytest.mark.parametrize("name", ["bf16", "uniform:4", "mbq:2"])
def test_masks_beside_activations_are_not_rounded(name: str) -> None:
    """0 of -1e9 rounded to that would be some 1e5, beside which scores do not count."""
    coding = parse(name, gradients=False)
    mask, scores = torch.zeros(64, 64), torch.randn(64, 64)
    mask[:, 40:] = -1e9

    def received(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        specs = tuple(map(TensorSpec.of, tensors))
        buffer = aligned(buffer_bytes(specs, coding))
        flat = tuple(spec.flatten(one) for spec, one in zip(specs, tensors, strict=True))
        header = encode(LABEL, specs, flat, buffer, coding, now=now)
        assert header.codec == coding.number
        return decode({4: specs}, buffer[: HEADER_BYTES + header.length], coding).tensors

    coded, same = received(scores.requires_grad_(), mask)
    assert not coded.equal(scores)
    assert same.equal(mask)
    coded, also = received(scores.detach(), mask)  # what does not train may be large, too
    assert not coded.equal(scores.detach())
    assert not also.equal(mask)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, HEADER_BYTES + 47), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, flip: int) -> None:
    specs = (TensorSpec.of(torch.arange(12, dtype=torch.float32)),)
    buffer = aligned(wire_bytes(specs))
    encode(LABEL, specs, (torch.arange(12, dtype=torch.float32),), buffer, now=now)
    buffer[at] ^= flip
    with pytest.raises(ProtocolError):
        decode({4: specs}, buffer)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_an_error(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode({4: (TensorSpec.of(torch.zeros(3)),)}, np.frombuffer(noise, np.uint8).copy())


def test_truncated_and_foreign_messages() -> None:
    specs = (TensorSpec.of(torch.zeros(12)),)
    buffer = aligned(wire_bytes(specs))
    encode(LABEL, specs, (torch.zeros(12),), buffer, now=now)
    with pytest.raises(ProtocolError, match="announces"):
        decode({4: specs}, buffer[:-8])
    with pytest.raises(ProtocolError, match="agreed were"):
        decode({5: specs}, buffer)
    with pytest.raises(ProtocolError, match="bytes where"):
        decode({4: (TensorSpec.of(torch.zeros(50)),)}, buffer)


def test_what_differs_from_what_was_agreed_is_seen() -> None:
    spec = TensorSpec.of(torch.zeros(3, 2))
    assert spec.fits(torch.ones(3, 2))
    others = torch.zeros(4, 2), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 3).t(), torch.zeros(1).expand(3, 2)
    assert not any(spec.fits(other) for other in (*others, None, torch.zeros(3, 2, requires_grad=True)))
    assert spec.fits(torch.zeros(3, 2, requires_grad=True), training=False)
    assert TensorSpec.of(None).fits(None)
    assert not TensorSpec.of(None).fits(torch.zeros(3))
    assert TensorSpec.of(torch.zeros(1, 3)).fits(torch.zeros(3, 1).t()), "strides of dimensions of 1 mean nothing"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_message_may_say_itself_what_it_is(name: str) -> None:
    """Whatever was agreed for its number of samples, or nothing at all."""
    tensor = LAYOUTS[name]
    specs = TensorSpec.of(tensor), TensorSpec.of(None)
    _, tree = flatten({"a": (None, True), "b": tensor})
    description = describe(specs, tree)
    buffer = aligned(buffer_bytes(specs, NONE, description))
    header = encode(LABEL, specs, (specs[0].flatten(tensor), None), buffer, description=description, now=now)
    for agreed in ({}, {4: (TensorSpec.of(torch.zeros(9)),)}):
        found = decode(agreed, buffer[: HEADER_BYTES + header.length])
        assert found.tree == tree
        assert found.raw == sum(spec.nbytes for spec in specs)
        assert found.tensors[1] is None
        back = unflatten(found.tree, found.tensors)
        assert back["a"] == (None, True)
        assert back["b"].nan_to_num(nan=7.0).equal(tensor.nan_to_num(nan=7.0))
        assert TensorSpec.of(back["b"]) == specs[0]


def test_a_message_too_large_for_its_buffer_is_announced() -> None:
    specs = (TensorSpec.of(torch.zeros(100)),)
    buffer = aligned(wire_bytes(specs))
    header = encode(LABEL, specs, (torch.zeros(100),), buffer, now=now)
    assert announced(buffer) == 0
    assert announced(header.announce()) == buffer.size
    damaged = header.announce()
    damaged[20] ^= 1
    with pytest.raises(ProtocolError, match="checksum"):
        announced(damaged)
    with pytest.raises(ProtocolError, match="after its header and has"):
        received({100: specs}, buffer[:-64])


def test_a_received_message_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums take a core's time for each byte."""
    specs = (TensorSpec.of(torch.zeros(100)),)
    buffer = aligned(wire_bytes(specs))
    encode(LABEL, specs, (torch.zeros(100),), buffer, now=now)
    checked, checksum = [], message._checksum
    monkeypatch.setattr(message, "_checksum", lambda *parts: checked.append(sum(p.size for p in parts)) or checksum(*parts))
    received({4: specs}, buffer)
    assert checked == [buffer.size]


def received(agreed: dict[int, tuple[TensorSpec, ...]], buffer: Bytes) -> Decoded:
    """What a channel does with a message that has arrived."""
    assert not announced(buffer)
    return decode(agreed, buffer)


def test_a_gradient_laid_out_otherwise_is_copied_into_the_agreed_layout() -> None:
    agreed = TensorSpec.of(LAYOUTS["channels_last"])
    other = torch.randn(4, 3, 5, 6)
    flat = agreed.flatten(other)
    assert flat is not None
    back = agreed.unflatten(flat.view(torch.uint8).numpy())
    assert back is not None
    assert back.equal(other)
    assert back.stride() == agreed.stride


def test_a_layer_s_number_and_how_the_step_ends_have_fields_of_their_own() -> None:
    """They shared 16 bits: layer 4,096 and those behind it set flags."""
    specs = (TensorSpec.of(torch.zeros(3)),)
    for suspect in (0, 1, 4096, 0x1000, 70_000, 2**32 - 1):
        buffer = aligned(wire_bytes(specs))
        encode(LABEL._replace(flags=0x8000, suspect=suspect), specs, (torch.zeros(3),), buffer, now=now)
        header = Header.unpack(buffer)
        assert (header.flags, header.suspect) == (0x8000, suspect)


@pytest.mark.parametrize("way", Direction)
def test_a_step_beyond_32_bits(way: Direction) -> None:
    """A job may ask for so many steps that nobody will see the last; it was refused because a header had no room."""
    specs = (TensorSpec.of(torch.zeros(3)),)
    for coding in (parse(name, False) for name in ("none", "bf16", "fp16", "uniform:4", "mbq:2")):
        buffer = aligned(buffer_bytes(specs, coding))
        label = LABEL._replace(direction=way, step=10**18 - 1)
        made = encode(label, specs, (torch.ones(3),), buffer, coding, now=now)
        header = Header.unpack(buffer[: HEADER_BYTES + made.length])
        assert (header.direction, header.codec, header.step) == (way, coding.number, 10**18 - 1)
