"""AccEPT's latency predictor, a dual-stream regression network (a reconstruction: its sizes and losses are not published).

One stream takes a sub-model as a binary vector over layers, the other a device as its measured times of ``PROBES``
representative sub-models; joined, they give the logarithms of forward and backward time.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from accept_mpi.prediction.fitting import BETA, descend, mlp, some_of
from accept_mpi.prediction.samples import PROBES, DeviceSamples, Intervals, device_vector, membership

_WIDTH = 64
_LAYERS = 128  # layers that the binary vector has room for
_STEPS, _RATE = 1200, 3e-3


class DualStream(nn.Module):
    """AccEPT's network (reconstruction): a stream for the binary vector and one for the probe times, joined with their
    product, give two times. ``models``: the keys of the models that it will know."""

    def __init__(self, models: Sequence[str]) -> None:
        super().__init__()
        self.models = {key: n for n, key in enumerate(models)}
        self.sub_model = mlp(_LAYERS + len(self.models), _WIDTH, _WIDTH)
        self.device = mlp(2 * PROBES, _WIDTH, _WIDTH)
        self.joined = mlp(3 * _WIDTH, _WIDTH, 2)

    def forward(self, known: DeviceSamples, intervals: Intervals) -> torch.Tensor:
        """(k, 2) logarithms of seconds forward and backward, for k intervals on the device of ``known``."""
        chosen = np.zeros((len(intervals), _LAYERS + len(self.models)))
        chosen[:, : known.layers] = membership(intervals, known.layers)
        if known.model in self.models:
            chosen[:, _LAYERS + self.models[known.model]] = 1
        u = self.sub_model(torch.tensor(chosen, dtype=torch.float32))
        v = self.device(torch.tensor(device_vector(known), dtype=torch.float32)).expand_as(u)
        return self.joined(torch.cat([u, v, u * v], dim=1)) - 5


def train_dual_stream(data: Sequence[DeviceSamples], seed: int = 0, steps: int = _STEPS) -> DualStream:
    """Train a network on the times in ``data``."""
    torch.manual_seed(seed)
    network = DualStream(sorted({known.model for known in data}))
    generator = torch.Generator().manual_seed(seed)
    wanted = [torch.tensor(np.log(known.times), dtype=torch.float32) for known in data]

    def loss(n: int) -> torch.Tensor:
        return nn.functional.smooth_l1_loss(network(data[n], data[n].intervals), wanted[n], beta=BETA)

    descend(network, lambda _: [loss(n) for n in some_of(len(data), generator)], steps, _RATE)
    return network
