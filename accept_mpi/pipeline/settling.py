"""From when on nothing but weights may change in a stage that several compute, or that computes forwards again."""

from collections.abc import Sequence
from functools import partial

import torch

from accept_mpi.pipeline.grown import Change, made_alike, others, same_values, undo
from accept_mpi.pipeline.micro_batch import Inputs
from accept_mpi.pipeline.settled import Settled
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.trials import copy_of

_NO_STEP = -1  # in place of a step


def settle(stage: Stage) -> None:
    """Before the first step, where other ranks or lanes compute, too, or backwards compute forwards again: what forwards
    refer to must stay as it is from now on, but for what trials have seen change."""
    if stage.statistics is not None or stage.again:
        stage.settled.append(Settled(stage.modules, stage.seen, stage.found.changing, partial(_made_again, stage)))


def _made_again(stage: Stage, changes: Sequence[Change], given: Sequence[Inputs]) -> bool:
    """True if forwards of other values leave the same in modules that are as they were before ``changes``, and give then
    what they gave before. ``given``: what may have led to these."""
    moved = [other for one in given if (other := others(one))]
    if not moved or len(moved) < len(given):
        return False
    try:
        with stage.runner.drawing(), torch.no_grad(), copy_of(stage) as copy:
            parts = zip(copy.names, copy.layers, strict=True)
            modules = {path: one for name, layer in parts for path, one in layer.named_modules(prefix=name)}

            def gives(one: Inputs) -> object:
                *_, (_, value) = copy.runner.one_by_one(_NO_STEP, 0, one)
                return value

            before = []
            for one in moved:  # each from what there was
                undo(changes, modules)
                before.append(gives(one))
            undo(changes, modules)
            for one in moved:
                gives(one)
            return made_alike(changes, modules) and all(map(same_values, before, map(gives, moved)))
    except Exception:  # also if it is the loss that has changed, or layers cannot be copied
        return False
