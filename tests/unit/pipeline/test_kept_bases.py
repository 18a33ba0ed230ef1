"""Bases as part of a stage's state."""

import pytest
import torch

from accept_mpi.codecs.basis import NO_BASES, basis_of, packed
from accept_mpi.errors import UserError
from accept_mpi.pipeline.kept_bases import KeptBases

WIDTH = 16


def saw(kept: KeptBases, step: int, seed: int) -> list[torch.Tensor | None]:
    told = []
    kept.tell = lambda *words: told.append(words)
    out = torch.randn(4, 32, WIDTH, generator=torch.Generator().manual_seed(seed))
    kept.see(step, 0, [torch.zeros(3, dtype=torch.int64), out], [(out, out.flip(0))])
    ((_, _, found),) = told
    return found


def learned(kept: KeptBases, seed: int) -> dict:
    (sums,) = saw(kept, 8, seed)
    assert sums is not None
    found = basis_of(sums)
    assert found is not None
    return {1: found}


def test_the_newest_two_are_kept() -> None:
    kept = KeptBases("h-3", {1: WIDTH})
    assert kept.at(100) is NO_BASES
    every = [learned(kept, seed) for seed in range(3)]
    for n, new in enumerate(every):
        kept.add(12 + 32 * n, new, 8 + 32 * n)
    assert [kept.at(step)[1] is every[n][1] for step, n in ((44, 1), (75, 1), (76, 2), (1000, 2))] == [True] * 4
    assert kept.at(43) is NO_BASES
    state = kept.state()
    assert sorted(state) == ["bases/h-3.@44", "bases/h-3.@76"]
    again = KeptBases("h-3", {1: WIDTH})
    again.put(state)
    for step in (44, 76):
        for mine, its in zip(kept.at(step)[1], again.at(step)[1], strict=True):
            assert mine.equal(its)
    again.add(108, {}, 104)
    assert again.at(108)[1].back.equal(every[2][1].back)
    assert not again.at(75)


def test_those_of_steps_under_way_are_kept() -> None:
    """In an asynchronous pipeline in which more steps are under way than lie between two bases."""
    kept = KeptBases("h-3", {1: WIDTH})
    every = [learned(kept, seed) for seed in range(4)]
    for n, new in enumerate(every):
        kept.add(68 + 32 * n, new, 8 + 32 * n)
    assert [kept.at(step)[1] is every[n][1] for step, n in ((105, 1), (132, 2), (164, 3))] == [True] * 3
    assert sorted(kept.state()) == ["bases/h-3.@100", "bases/h-3.@132", "bases/h-3.@164"]


def test_those_of_other_layers_and_codecs_are_passed_over() -> None:
    kept = KeptBases("h-3", {1: WIDTH})
    kept.add(12, learned(kept, 0), 8)
    for other in (KeptBases("h-4", {1: WIDTH}), KeptBases("h-3", {})):
        other.put(kept.state())
        assert other.at(12) is NO_BASES
    with pytest.raises(UserError, match="is damaged"):
        KeptBases("h-3", {1: WIDTH}).put({"bases/h-3.@12": torch.zeros(5, dtype=torch.uint8)})
    whole = kept.state()["bases/h-3.@12"]
    infinite = packed({1: kept.at(12)[1]._replace(mean=torch.full((WIDTH,), torch.inf))})
    for key, value in (
        ("x", whole), ("12", torch.zeros(5, dtype=torch.bfloat16)), ("12", torch.tensor(1.0)),
        ("12", torch.frombuffer(bytearray(infinite), dtype=torch.uint8)),
    ):  # fmt: skip
        with pytest.raises(UserError, match="is damaged"):
            KeptBases("h-3", {1: WIDTH}).put({f"bases/h-3.@{key}": value})
    wider = KeptBases("h-3", {1: 2 * WIDTH})
    wider.put(kept.state())
    assert not wider.at(12)


def test_what_is_looked_at() -> None:
    kept = KeptBases("h-3", {1: WIDTH})
    out = torch.zeros(4, WIDTH)
    told: list[tuple] = []
    kept.tell = lambda *words: told.append(words)
    kept.see(9, 0, [out, out], [])
    assert not told
    for outputs in ([out], [out, None], [out, out[:, 1:]], [out, out.long()], [out, torch.tensor(1.0)]):
        kept.see(40, 0, outputs, [])
        assert told.pop() == (40, 0, [None])
