"""Runs a stage's layers one after another, each with random numbers of its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accept_mpi import tree
from accept_mpi.device.compute import here
from accept_mpi.job import Job
from accept_mpi.models.layers import Layers, may_draw
from accept_mpi.pipeline.findings import Findings
from accept_mpi.pipeline.graph_edges import Progress, seeded_backward
from accept_mpi.pipeline.micro_batch import Inputs
from accept_mpi.pipeline.turns import Turns
from accept_mpi.seeds import forward_seed, seed_all, seed_torch, state
from accept_mpi.tree import Tree
from accept_mpi.users_code import call_layer


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its graph, to which the next layer may write."""
    found = tensor.detach()
    return found.requires_grad_() * 1 if tensor.requires_grad and torch.is_grad_enabled() else found


class LayerRunner:
    """The layers of a stage, as its thread runs them."""

    def __init__(self, layers: Layers, job: Job, found: Findings) -> None:
        """``found``: gets the layers that draw random numbers, while ``setting_up``."""
        self._start, self._names, self._layers, self._found = layers.start, layers.names, layers.modules, found
        self._draws = [may_draw(layer) for layer in layers.modules]
        self._bf16, self._seed = job.train.precision == "bf16", job.train.seed
        self.setting_up = False
        """If these are copies to try things on."""
        self.turns: Turns | None = None
        """If several threads compute the stage."""
        self.progress = Progress()
        self.keeps_casts = True
        """Torch keeps its casts to lower precision for all threads."""

    def drawing(self) -> AbstractContextManager[None]:
        """A context for what draws random numbers: no other thread that computes the stage does so meanwhile."""
        return nullcontext() if self.turns is None else self.turns.drawing()

    def precise(self) -> AbstractContextManager[object]:
        """A context in which forwards compute with the job's precision."""
        if not self._bf16:
            return nullcontext()
        return torch.autocast(here().device.type, torch.bfloat16, cache_enabled=self.keeps_casts)

    def run(
        self, inputs: Sequence[Any], of: Tree | None, seed: Callable[[int], int], back: Callable[[int], int] | None = None
    ) -> Any:
        """Output of the last layer. Each layer's random numbers are seeded by ``seed`` of its index, and those of its
        backward by ``back``, if given."""
        value = tree.unflatten(of or tree.packed(len(inputs)), inputs)
        for index, (name, layer) in enumerate(zip(self._names, self._layers, strict=True), self._start):
            self.progress.watch(index, value)
            if self.turns is not None and index not in self._found.drawing:
                value = call_layer(index, name, layer, value)
                continue
            with self.drawing():
                self._seed_layer(index, seed(index))
                before = self.drawn()
                value = call_layer(index, name, layer, value, self.setting_up)
            if back is not None:
                value = seeded_backward(value, back(index))
            self.note_draws(index, before)
        return value

    def one_by_one(self, step: int, micro_batch: int, given: Inputs) -> Iterator[tuple[int, Any]]:
        """Run copies of layers; yield each one's index and output. It may write to copies of the inputs."""
        value = tree.unflatten(given.tree, [x if x is None else x.clone() for x in here().take(given.tensors)])
        for index, layer in enumerate(self._layers, self._start):
            with self.precise():
                self._seed_layer(index, forward_seed(self._seed, step, micro_batch, index))
                value = tree.replace(layer(value), _apart)
            yield index, value

    def drawn(self) -> tuple[object, ...]:
        """State of random numbers, to compare, while setting up."""
        return state() if self.setting_up else ()

    def note_draws(self, index: int, before: tuple[object, ...]) -> None:
        """Take note of a layer, or the loss after the last one, that has drawn random numbers since ``drawn``."""
        if self.drawn() != before:
            self._found.drawing.add(index)

    def _seed_layer(self, index: int, seed: int) -> None:
        """Seed the random numbers of a layer; torch's own layers use torch's only."""
        if self._draws[index - self._start]:
            seed_all(seed)
        else:
            seed_torch(seed)
