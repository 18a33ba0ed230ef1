"""BatchNorm's running statistics, replayed from those of single micro-batches, against torch's own, bit for bit."""

import copy

import pytest
import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.pipeline.running_statistics import RunningStatistics


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 33, 3), nn.BatchNorm2d(33, momentum=None),
        nn.Flatten(), nn.BatchNorm1d(33 * 16, momentum=0.03), nn.BatchNorm1d(33 * 16, track_running_stats=False),
    )  # fmt: skip


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("samples", [2, 5])
def test_replayed_statistics(layout: torch.memory_format, samples: int) -> None:
    torch.manual_seed(0)
    plain = model().to(memory_format=layout)
    plain(torch.randn(2, 3, 8, 8))
    group = copy.deepcopy(plain)
    batches = [(torch.randn(samples, 3, 8, 8) * 3 + 1).to(memory_format=layout) for _ in range(20)]
    statistics = RunningStatistics([str(i) for i in range(len(group))], list(group))
    taken, flying = [], []
    for x in batches:
        with statistics.taken() as found:
            given = group(x)
        taken += found
        flying.append(given)
        assert torch.equal(given, plain(x))
    for given in flying:  # backwards of several micro-batches follow later
        given.sum().backward()
    assert all(len(values) == statistics.size for values in taken)
    statistics.replay(taken)
    assert plain.state_dict().keys() == group.state_dict().keys()
    for (name, mine), theirs in zip(group.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def test_layers_without_any() -> None:
    statistics = RunningStatistics(["a"], [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))])
    with statistics.taken() as found:
        pass
    assert statistics.size == len(found[0]) == 0
    statistics.replay(found)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_statistics_of_inputs_in_lower_precision(kind: torch.dtype) -> None:
    """Torch combines them otherwise than those of others."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm1d(67), nn.BatchNorm1d(67, momentum=0.03))
    group = copy.deepcopy(plain)
    statistics = RunningStatistics(["0", "1"], list(group), {"0": kind, "1": torch.float32})
    for _ in range(20):
        given = torch.randn(5, 67) * 3 + 1
        with statistics.taken() as found:
            for layer, x in zip(group, (given.to(kind), given), strict=True):
                layer(x)
        statistics.replay(found)
        for layer, x in zip(plain, (given.to(kind), given), strict=True):
            layer(x)
    for (name, mine), theirs in zip(group.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def test_layers_at_rest_keep_theirs() -> None:
    """A frozen layer (eval mode) uses its running statistics and does not change them, nor what backwards to come need."""
    layer, beside = nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4)
    statistics = RunningStatistics(["norm", "beside"], [layer, beside])
    x = torch.randn(3, 4, requires_grad=True)
    with statistics.taken() as found:
        at_rest = layer(x)
        given = at_rest + beside(torch.randn(3, 4))
    assert torch.equal(at_rest, nn.BatchNorm1d(4).eval()(x))
    statistics.replay(found)
    given.sum().backward()
    assert torch.equal(layer.running_mean, torch.zeros(4))
    assert not layer.num_batches_tracked
    assert beside.num_batches_tracked == 1


def test_a_layer_used_twice_is_refused() -> None:
    layer = nn.BatchNorm1d(4)
    with pytest.raises(UserError, match='"norm" is used twice'), RunningStatistics(["norm"], [layer]).taken():
        layer(layer(torch.randn(3, 4)))
    assert not layer.num_batches_tracked


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_inputs_that_are_not_contiguous(kind: torch.dtype) -> None:
    """Torch rounds what it makes of them later; some micro-batches may be contiguous (here those of one row)."""
    generator = torch.Generator().manual_seed(3)
    for case in range(300):
        width = int(torch.randint(1, 70, (), generator=generator))
        momentum = [0.1, 0.03, 1 / 3, None, 0.9][case % 5]
        plain = nn.BatchNorm1d(width, momentum=momentum)
        group = copy.deepcopy(plain)
        statistics = RunningStatistics(["a"], [group], {"a": kind}, {"a"})
        taken = []
        for n in range(4):
            rows = int(torch.randint(2, 40, (), generator=generator)) if n else 1
            x = torch.randn(2, rows, width, generator=generator) * 10 ** float(torch.randn((), generator=generator)) + 3
            x = x.to(kind).transpose(1, 2)
            with statistics.taken() as found:
                given = group(x)
            assert torch.equal(given, plain(x))
            taken += found
        assert not group._forward_hooks
        statistics.replay(taken)
        for (name, mine), theirs in zip(group.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(mine, theirs), (case, name)
