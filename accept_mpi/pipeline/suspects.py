"""The search for what makes values that are not finite."""

from typing import Any

from accept_mpi import tree
from accept_mpi.pipeline.graph_edges import finite
from accept_mpi.pipeline.micro_batch import Inputs
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.trials import copy_of

_SEARCHES = 3


class Suspects:
    """Names suspects, as ``codecs.message.Header.suspect`` does: the number, from 2, of the first layer that makes NaN or
    infinity out of finite values; 1 if the data set gives such values; 0: none of this stage's layers, or not known."""

    def __init__(self) -> None:
        self._left = _SEARCHES
        """A model may intend its infinities (masks), so this does not search forever."""

    def find(self, stage: Stage, step: int, micro_batch: int, given: Inputs, target: Any) -> int:
        """The suspect of a micro-batch whose forward gave values that are not finite; a layer is found by running a copy of
        the stage layer by layer."""
        sound = finite([x for x in given.tensors if x is not None])
        if (stage.start == 0 and not sound) or not finite(tree.leaves(target)):
            return 1
        if self._left == 0 or not sound:
            return 0
        self._left -= 1
        with stage.runner.drawing(), copy_of(stage) as copy:  # with gradients, of which a forward may take derivatives
            for index, value in copy.runner.one_by_one(step, micro_batch, given):
                if not finite(tree.leaves(value)):
                    return index + 2
        return 0  # then it is the loss
