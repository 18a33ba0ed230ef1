"""Agreement on shapes."""

import torch
from torch import nn

from accept_mpi import config
from accept_mpi.data import ArrayDataset
from accept_mpi.losses import cross_entropy
from accept_mpi.models.layers import Layers
from accept_mpi.plan import Place
from accept_mpi.signature import agree_on_shapes
from accept_mpi.stage import Stage


class NoMessenger:
    def flush(self, deadline: float, awaited: str) -> None:
        pass


def test_a_last_test_sample_alone_does_not_stop_a_run_with_batch_norm() -> None:
    """BatchNorm1d refuses to train on one sample, but evaluates it: a size that only evaluation has is not trained on."""
    job = config.parse('[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\n[output]\ndirectory="r"\n', "job")
    layers = Layers(0, ["a", "b"], [nn.Linear(3, 2), nn.BatchNorm1d(2)])
    stage = Stage(layers, job, cross_entropy, False)
    data = ArrayDataset(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64))
    place = Place(0, 1, None, None)
    agree_on_shapes(NoMessenger(), stage, place, ([4], [4, 1]), data, 1.0)  # type: ignore[arg-type]
    assert stage.layers[1].training
    assert int(stage.layers[1].num_batches_tracked) == 0
