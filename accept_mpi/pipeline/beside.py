"""A stage's actions as two lists, forwards and the rest, for a device that computes them side by side ("F+B" lanes)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from accept_mpi.pipeline.schedule import Action

Needs = Mapping[tuple[int, Action], tuple[int, Action]]
"""For an action of a device, an action of another device that must be over before."""


class Beside(NamedTuple):
    """The actions of a pipeline whose devices compute F beside B, for ``simulator.simulate``."""

    walks: list[list[Action]]
    """Of each stage, first the forwards, then all else."""
    stages: list[int]
    needs: Needs


def beside(walks: Sequence[Sequence[Action]]) -> Beside:
    """Split each stage's actions. B waits for its F; F for the actions before it in the schedule that are no forwards, which
    bounds the micro-batches in flight; U waits for nothing in the other list, since its B does."""
    found: list[list[Action]] = []
    needs: dict[tuple[int, Action], tuple[int, Action]] = {}
    for s, walk in enumerate(walks):
        forwards, others = 2 * s, 2 * s + 1
        by_key = {action[1:3]: action for action in walk if action.kind == "F"}
        before: Action | None = None
        for action in walk:
            if action.kind == "F":
                if before is not None:
                    needs[forwards, action] = (others, before)
            else:
                if action.kind == "B":
                    needs[others, action] = (forwards, by_key[action[1:3]])
                before = action
        found += [[a for a in walk if a.kind == "F"], [a for a in walk if a.kind != "F"]]
    return Beside(found, [s for s in range(len(walks)) for _ in range(2)], needs)
