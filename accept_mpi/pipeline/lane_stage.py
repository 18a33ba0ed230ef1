"""A stage for a lane: another thread that computes some of the micro-batches of the same layers."""

from typing import Any

from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.copies import copied, why_not_copied
from accept_mpi.models.layers import Layers
from accept_mpi.pipeline.recomputing import Recomputing
from accept_mpi.pipeline.running_statistics import RunningStatistics
from accept_mpi.pipeline.settling import settle
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
    lane = Stage(Layers(stage.start, stage.names, modules), stage.job, stage.loss, stage.channels_last, found=stage.found)
    lane._weights = LaneWeights(stage._weights, lane.parameters)
    lane.optimizer, lane.bases = None, stage.bases
    if lane.deferred is not None and stage.deferred is not None:
        lane.deferred.learn(stage.deferred.never)
    lane.statistics = RunningStatistics(lane.names, lane.layers, apart=stage.found.norms_apart)
    lane.runner.turns, lane.runner.keeps_casts = turns, False
    lane.again = Recomputing(lane.layers) if stage.again else None
    settle(lane)
    stage.settled += lane.settled
    return lane
