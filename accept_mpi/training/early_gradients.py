"""Gradients that a backward passes on before its end, so that they are summed while it goes on."""

import statistics
import time
from collections.abc import Sequence

import torch

from accept_mpi.codecs.gradient_chunks import Gradients, Layout
from accept_mpi.errors import UserError
from accept_mpi.pipeline.deal import early_worth
from accept_mpi.pipeline.stage import Stage

_STEPS = 5
"""Number of steps of which the median counts."""


class EarlyGradients:
    """Which gradients of a stage's part to pass on while B goes on. None in the first B, which shows whether they may be: a
    layer might use a later one's parameters."""

    def __init__(self, stage: Stage, parameters: Sequence[int], layout: Layout, shares_core: bool) -> None:
        """``parameters``: positions among the stage's trained ones; ``shares_core``: as of the data plane."""
        self._progress = stage.runner.progress
        self._trained = [stage.trained[n] for n in parameters]
        self._names = [stage.trained_names[n] for n in parameters]
        self._layout = layout
        self._layers = layout.layers - {stage.start}
        self._worth = early_worth(shares_core)
        self._since: float | None = None
        self._shares: list[float] = []
        self._keeps: bool | None = None
        """True if gradients have stayed what they were when B passed their layers; None before the first B."""
        self._chunks: set[int] = set()
        self._seen: dict[int, tuple[torch.Tensor | None, int]] = {}
        """Gradients in these chunks, and how often each had been written to."""

    def waited(self, began: float) -> None:
        """Note that this rank has waited for a step's sum since ``began`` (monotonic clock)."""
        if self._progress.layers or not self._layers:
            return
        before, self._since = self._since, time.monotonic()
        if before is None:
            return
        self._shares.append((self._since - began) / (self._since - before))
        if len(self._shares) == _STEPS:
            if statistics.median(self._shares) > self._worth:
                self._progress.layers = self._layers
            self._shares = []

    def reached(self, layer: int) -> tuple[list[int], dict[int, torch.Tensor | None]]:
        """Chunks to pass on now that the gradients from ``layer`` on are there, and the gradients that are in them."""
        chunks = self._layout.whole(layer, self._chunks) if self._keeps is not False else []
        self._chunks.update(chunks)
        gradients = {n: self._trained[n].grad for n in self._layout.within(chunks)}
        for n, gradient in gradients.items():
            self._seen.setdefault(n, (gradient, _writes(gradient)))
        return (chunks, gradients) if self._keeps else ([], {})

    def end(self, gradients: Gradients) -> set[int]:
        """The chunks that have been passed on, now that all gradients are there. Raises UserError if some have changed."""
        changed = [n for n, (one, writes) in self._seen.items() if gradients[n] is not one or _writes(one) != writes]
        if self._keeps and changed:
            raise UserError(
                f'"{self._names[changed[0]]}" got a gradient after the backward of its own layer, which had not happened '
                "before; its group had summed it by then. No group can hold this stage"
            )
        passed_on = self._chunks if self._keeps else set()
        if self._seen:
            self._keeps = not changed
        self._chunks, self._seen = set(), {}
        return passed_on


def _writes(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
