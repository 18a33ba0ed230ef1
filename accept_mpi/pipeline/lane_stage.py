"""A stage for a lane: another thread that computes some of the micro-batches of the same layers."""

from typing import Any

from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.copies import copied, why_not_copied
from accept_mpi.models.layers import Layers
from accept_mpi.pipeline.recomputing import Recomputing
from accept_mpi.pipeline.running_statistics import RunningStatistics
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.weight_versions import LaneWeights


def lane_of(stage: Stage) -> Stage:
    """A stage with copies of the layers that share the given one's parameters and buffers, but have gradients of their own,
    which ``exchange_gradients`` takes out. It makes no updates.

    Raises UserError if there can be none, as ``Stage.join_group`` and ``take_turns``, which come first, do.
    """
    turns = stage.take_turns()
    assert stage.statistics is not None
    memo: dict[int, Any] = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in stage.parameters}
    memo |= {id(buffer): buffer for layer in stage.layers for buffer in layer.buffers()}
    try:
        modules = copied(stage.layers, memo)
    except Exception as error:
        raise UserError(f"pipeline.lanes: {why_not_copied(stage.names, stage.layers, error)}") from error
    lane = Stage(Layers(stage.start, stage.names, modules), stage._job, stage._loss, stage._channels_last)
    lane._weights = LaneWeights(stage._weights, lane.parameters)
    lane.optimizer = None
    if lane._deferred is not None and stage._deferred is not None:
        lane._deferred.learn(stage._deferred)
    lane.statistics = RunningStatistics(lane.names, lane.layers, apart=stage.norms_apart)
    lane._turns, lane._drawing = turns, stage._drawing
    lane.again = Recomputing(lane.layers) if stage.again else None
    lane._changing = stage._changing
    stage._settled += lane.settle()
    return lane
