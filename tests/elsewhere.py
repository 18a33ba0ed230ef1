"""What models in tests find in another Python module than their own: counters, tables that are kept, functions."""

import functools
from typing import ClassVar

import torch

calls = 0
NOTES = {"calls": 0}
TABLES: dict[int, torch.Tensor] = {}


class Settings:
    calls = 0
    tables: ClassVar[dict[int, torch.Tensor]] = {}

    @classmethod
    def table(cls, size: int) -> torch.Tensor:
        if size not in cls.tables:
            cls.tables[size] = torch.arange(float(size))
        return cls.tables[size]


def share() -> float:
    NOTES["calls"] += 1
    return min(1.0, NOTES["calls"] / 10)


def by_attribute() -> float:
    by_attribute.calls += 1  # type: ignore[attr-defined]
    return min(1.0, by_attribute.calls / 10)  # type: ignore[attr-defined]


by_attribute.calls = 0  # type: ignore[attr-defined]


def by_default(notes: list[int] = [0]) -> float:  # noqa: B006
    notes[0] += 1
    return min(1.0, notes[0] / 10)


@functools.lru_cache
def table(size: int) -> torch.Tensor:
    return torch.triu(torch.ones(size, size))


def masked(x: torch.Tensor) -> torch.Tensor:
    return x @ table(x.shape[-1])


def tabled(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    if size not in TABLES:
        TABLES[size] = torch.arange(float(size))
    return x * TABLES[size]


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(len(x), -1)


def counted() -> list[int]:
    """All counters."""
    return [calls, NOTES["calls"], Settings.calls, by_attribute.calls, *by_default.__defaults__[0]]  # type: ignore


def forget() -> None:
    """Empty all tables."""
    table.cache_clear()
    TABLES.clear()
    Settings.tables.clear()
