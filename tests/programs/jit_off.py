"""Run with NUMBA_DISABLE_JIT=1: kernels as plain Python against their references; prints lines of kernels never run."""

import dis
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import naive
import numpy as np

RUN: set[tuple[str, int]] = set()
KERNELS = str(Path(__file__).resolve().parents[2] / "kernels")


def watch(frame, event, argument):
    """Notes the lines that run in kernels/."""
    if not frame.f_code.co_filename.startswith(KERNELS):
        return None
    RUN.add((frame.f_code.co_filename, frame.f_lineno))
    return watch


def lines(code: types.CodeType) -> Iterator[int]:
    """Of a function's body and of those within it."""
    yield from (line for _, line in dis.findlinestarts(code) if line and line != code.co_firstlineno)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from lines(constant)


def check_sizes() -> None:
    """Every codec's kernels on sizes around a block."""
    rng = np.random.default_rng(1)
    for size in (0, 1, 70, 16384 + 9):
        x = rng.standard_normal(size).astype(np.float32)
        check_half(x)
        check_levels(x)
        check_entropy(x)


def check_half(x: np.ndarray) -> None:
    """bfloat16, there and back."""
    from accept_mpi.kernels import half

    short, back = np.zeros(x.size, np.uint16), np.zeros(x.size, np.uint32)
    assert half.to_bf16(x.view(np.uint32), short)
    half.from_bf16(short, back)
    assert all(a == naive.nearest_bfloat16(b) for a, b in zip(back.view(np.float32), x, strict=True))


def check_levels(x: np.ndarray) -> None:
    """Uniform and multi-bit quantization with all bits, where that does not take long."""
    from accept_mpi.kernels import mbq, uniform, uniform_decoder

    few = x.size < 100
    y = np.empty_like(x)
    for bits in range(1, 9) if few else (2, 4, 7):
        for group in (8, 64, 0) if few else (64,):
            for key in (None, 12345678901234567):
                out = np.zeros(uniform.encoded_bytes(x.size, bits, group), np.uint8)
                assert uniform.encode(x, bits, group, out, key) == 0
                uniform_decoder.decode(out, bits, group, y)
                expected, values = naive.uniform(x, bits, group, key)
                assert out.tobytes() == expected
                assert y.tobytes() == values.tobytes()
            if bits <= mbq.MOST_BITS:
                out = np.zeros(mbq.encoded_bytes(x.size, bits, group), np.uint8)
                assert mbq.encode(x, bits, group, out) == 0
                mbq.decode(out, bits, group, y)
                expected, values = naive.mbq(x, bits, group)
                assert out.tobytes() == expected
                assert y.tobytes() == values.tobytes()


def check_entropy(x: np.ndarray) -> None:
    """The entropy code on values of several distributions, rounded to nearest and with dither."""
    for bits in (1.5, 4.5) if x.size < 100 else (2.5,):
        for values in (x, x**7, x * 0 + 1, np.where(x > 2, x, np.float32(0))):
            for key in (None, 12345678901234567):
                entropy_coded(values, bits, key)


def entropy_coded(x: np.ndarray, bits: float, key: int | None = None) -> np.ndarray:
    """A message that decodes to what its naive reference does."""
    from accept_mpi.kernels import entropy

    out, y = np.zeros(entropy.encoded_bytes(x.size, bits), np.uint8), np.zeros(x.size, np.float32)
    assert entropy.encode(x, bits, 0, out, key) == 0
    entropy.decode(out, bits, 0, y)
    assert not x.size or y.tobytes() == naive.entropy(out.tobytes(), x.size).tobytes()
    return out


def check_classes() -> None:
    """The entropy code where blocks differ in size, so that they have classes."""
    rows = (np.arange(1219, dtype=np.float32) % 7 - 3) * np.repeat(np.float32([1, 4, 16, 64] * 5), 64)[:1219]
    assert entropy_coded(rows, 2.5, 99)[48] & 15 > 1
    wide = np.random.default_rng(1).standard_normal((16, 64)) * np.tile([1e-3, 1], 8)[:, None]
    wide[:, 17], wide[:, 19] = 21000, -21000  # at first its tables do not fit
    entropy_coded(wide.ravel().astype(np.float32), 1.5)


def check_damage() -> None:
    """Messages that are damaged, and one for which there is no room."""
    from accept_mpi.kernels import entropy, rans

    zeros, ones = np.zeros(71, np.int64), np.ones(71, np.int64)
    no_class, short, words = np.zeros(1, np.uint8), np.zeros(1, np.uint16), np.zeros(2, np.uint32)
    assert rans.write(np.zeros(9, np.int16), np.full(9, 35, np.uint8), no_class, ones, zeros, short, words) == -1
    cut_off = np.full(96, 255, np.uint8)
    cut_off[48:52] = 2, 0, 0, 43  # two classes, and the first one's table fills the rest
    for damaged in (np.zeros(96, np.uint8), np.full(96, 255, np.uint8), cut_off):
        y = np.ones(9, np.float32)
        entropy._decode(damaged, y)
        assert not y.any()


def check_refusals() -> None:
    """Values that a codec has no code for, and arguments that do not fit."""
    from accept_mpi.kernels import entropy, half, mbq, uniform

    for value, well in ((np.nan, True), (-np.inf, True), (np.finfo(np.float32).max, False)):
        special = np.array([1.5, value], np.float32)
        assert half.to_bf16(special.view(np.uint32), np.zeros(2, np.uint16)) == well
    big = np.full(64, 3e38, np.float32)
    big[::2] *= -1
    near = np.full(64, 2e37, np.float32)  # its extent is fine, what it is made of is not
    assert mbq.encode(near, 2, 64, np.zeros(mbq.encoded_bytes(64, 2, 64), np.uint8)) == 2
    for kernels in (uniform, mbq, entropy):
        for value in (np.float32(np.nan), big[0]):
            bad = np.where(np.arange(64) == 7, value, big)
            for group in (64, 0, 8):
                out = np.zeros(kernels.encoded_bytes(64, 2, group), np.uint8)
                assert kernels.encode(bad, 2, group, out) in (1, 2)
        for arguments in ((np.zeros(9), 2, 8), (big, 99, 8), (big, 2, 48), (big, 2, 64)):
            try:
                kernels.encode(*arguments, np.zeros(3, np.uint8))
            except ValueError:
                continue
            raise AssertionError(f"{arguments} were taken")


def check_search() -> None:
    """The partitioner's searches on random small problems, with tables that are full at once, too."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "planning"))
    from test_search import least, random_problem

    from accept_mpi.planning import search

    np.seterr(all="ignore")
    rng = np.random.default_rng(5)
    for number in range(160):
        problem = random_problem(rng, 1 + number % 4, 2 + number % 4, 1 + number % 2)
        ordered = bool(problem.fill) or number % 3 == 0
        search._ROOM = 1 if number % 2 else 160
        search.MOST_EXACT = search.MOST_ORDERED = 32 if number % 5 else 1
        search.BEAM = 24 if number % 10 else 2
        expected = least(problem, ordered)
        try:
            plan = search.solve(problem, ordered)
        except search.NoPlan:
            assert expected is None or not number % 5
            continue
        found = search.cost(problem, plan)
        reached = found.step if problem.fill else found.bottleneck
        assert expected is not None
        assert reached >= expected * (1 - 1e-9)
        assert reached <= expected * (1 + 1e-6) or not number % 5


def check_events() -> None:
    """The simulator's loop on a pipeline, and on lists that wait for each other."""
    from accept_mpi.pipeline.deal import of_member
    from accept_mpi.pipeline.schedule import actions, parse
    from accept_mpi.pipeline.simulator import PackedSchedule, simulate, simulate_packed

    lists = [actions("zero-bubble", s, 3, [4, 4], 1) for s in range(3)]
    group = actions("1f1b", 0, 2, [4, 4], 1, widths=[2, 1])
    alike = [list(of_member(group, [0, 1, 0, 1], member)) for member in (0, 1)]
    cases = [(lists, [0, 1, 2]), ([*alike, actions("1f1b", 1, 2, [4, 4], 1, widths=[2, 1])], [0, 0, 1])]
    for walks, stages in cases:
        sums = np.ones(max(stages) + 1)
        _, ends = simulate_packed(PackedSchedule(walks, [4, 4], stages), np.ones((3, 4)), np.ones((3, 3)), sums)
        seconds = simulate(
            walks, lambda d, action: 1.0 + (action.kind == "B" and action.whole), lambda source, target: 1.0,
            stages=stages, sums=lambda stage: 1.0,
        )  # fmt: skip
        assert ends.max() == seconds.makespan
    try:
        simulate_packed(PackedSchedule([parse("F0.0 B0.1"), parse("F0.0 B0.0")], [2]), np.ones((2, 4)), np.ones((2, 2)))
    except RuntimeError:
        return
    raise AssertionError("a deadlock went unseen")


sys.settrace(watch)
np.seterr(all="raise", over="ignore", under="ignore")
check_sizes()
check_classes()
check_damage()
check_refusals()
check_events()
check_search()
sys.settrace(None)
for path in sorted(Path(KERNELS).glob("*.py")):
    if path.name in ("options.py", "cache.py", "prefetch.py", "__init__.py"):  # no kernels in these
        continue
    body = compile(path.read_text(), str(path), "exec")
    functions = [code for code in body.co_consts if isinstance(code, types.CodeType)]
    text = path.read_text().splitlines()
    for line in sorted({line for function in functions for line in lines(function)} - {n for f, n in RUN if f == str(path)}):
        print(f"{path.name}:{line}: {text[line - 1].strip()}")
