"""A stage that has been tried, as a deployment tries it before the first step."""

from typing import Any

from accept_mpi.codecs.tensors import TensorSpec
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.trials import trial_of


def probe(stage: Stage, *given: Any) -> tuple[TensorSpec, ...]:
    """``Trial.probe`` in a trial of its own."""
    with trial_of(stage) as trial:
        return trial.probe(*given)
