"""Learning rates and optimizers."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from conftest import HANGS, ROOT
from torch import nn

from accept_mpi.job import Optimizer, ParameterGroup
from accept_mpi.pipeline.correction import Correction
from accept_mpi.pipeline.lion import Lion
from accept_mpi.pipeline.muon import matrices, orthogonal
from accept_mpi.pipeline.optimizer import (
    SCALARS,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    state_names,
    update,
    values_kept,
)


def rates(options: Optimizer, steps: int = 10) -> list[float]:
    return [learning_rate(options, 1.0, step, steps) for step in range(steps)]


def test_constant_step_cosine() -> None:
    assert rates(Optimizer()) == [1.0] * 10
    assert rates(Optimizer(schedule="step", decay_every=4, decay=0.5)) == [1.0] * 4 + [0.5] * 4 + [0.25] * 2
    cosine = rates(Optimizer(schedule="cosine", final_lr=0.1))
    assert cosine == pytest.approx(_torch_cosine(10, 0.1))


def _torch_cosine(steps: int, last: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, last)
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_warmup() -> None:
    assert rates(Optimizer(warmup_steps=4))[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_schedules_begin_when_the_warm_up_is_over() -> None:
    """And end with the run, or go down every so many steps after the warm-up."""
    cosine = rates(Optimizer(warmup_steps=4, schedule="cosine", final_lr=0.1), 14)
    assert cosine == pytest.approx([0.25, 0.5, 0.75, 1.0, *_torch_cosine(10, 0.1)])
    stepwise = Optimizer(warmup_steps=4, schedule="step", decay_every=3, decay=0.5)
    assert rates(stepwise, 12) == [0.25, 0.5, 0.75, 1.0] + [1.0] * 3 + [0.5] * 3 + [0.25] * 2


def test_vectors_do_not_decay_where_a_job_says_so() -> None:
    """Nor do numbers; all else does, unless a group of its own says otherwise."""
    sizes = {"number": (), "vector": (3,), "matrix": (3, 2), "kernels": (2, 3, 2, 2), "own": (3,), "own matrix": (2, 2)}
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes.values()]
    groups = [ParameterGroup(names=["own*"], weight_decay=0.5)]
    for decays in (True, False):
        options = Optimizer(weight_decay=0.1, decay_vectors=decays)
        made = make_optimizer(options, 0.1, parameters, [[name] for name in sizes], groups)
        assert made is not None
        found = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
        small = 0.1 if decays else 0.0
        assert [found[id(p)] for p in parameters] == [small, small, 0.1, 0.1, 0.5, 0.5]


@pytest.mark.parametrize("own", [0.0, 0.03, 0.007, 0.3])
def test_rates_of_groups_are_torch_s_to_the_bit(own: float) -> None:
    """What is left of a rate after a division and a multiplication would differ in its last bit, and so would weights."""
    options, steps = Optimizer(schedule="step", decay_every=3, decay=0.3), 10
    one, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    ours = make_optimizer(options, 0.05, [one, other], [["one"], ["other"]], [ParameterGroup(names=["other"], lr=own)])
    torchs = torch.optim.SGD([{"params": [one]}, {"params": [other], "lr": own}], lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(torchs, lambda step: learning_rate(options, 0.05, step, steps) / 0.05)
    assert ours is not None
    for step in range(steps):
        usual = learning_rate(options, 0.05, step, steps)
        set_learning_rate(ours, usual, 0.05)
        assert ours.param_groups[0]["lr"] == usual
        assert ours.param_groups[1]["lr"] == torchs.param_groups[1]["lr"]
        torchs.step()
        schedule.step()


def test_what_a_group_leaves_out_is_the_job_s() -> None:
    own = [ParameterGroup(names=["slow"], lr=0.01), ParameterGroup(names=["firm"], weight_decay=0.0)]
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    options = Optimizer(name="muon", weight_decay=0.1)
    made = make_optimizer(options, 0.05, parameters, [["slow"], ["firm"], ["rest"]], own, [True] * 3)
    assert made is not None
    found = [(group["usual"], group["weight_decay"], group["matrix"]) for group in made.param_groups]
    assert found == [(0.01, 0.1, True), (0.05, 0.0, True), (0.05, 0.1, True)]


def test_kinds() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert isinstance(make_optimizer(Optimizer(name="adamw"), 0.1, parameters), torch.optim.AdamW)
    assert isinstance(make_optimizer(Optimizer(name="adam"), 0.1, parameters), torch.optim.Adam)
    sgd = make_optimizer(Optimizer(momentum=0.9, nesterov=True), 0.1, parameters)
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.param_groups[0]["nesterov"]
    assert isinstance(make_optimizer(Optimizer(name="nadam"), 0.1, parameters), torch.optim.NAdam)
    assert make_optimizer(Optimizer(), 0.1, []) is None


@pytest.mark.parametrize("name", ["sgd", "sgd's without", "adam", "adamw", "nadam", "lion", "muon", "muon's matrix"])
def test_names_and_numbers_of_the_state(name: str) -> None:
    """As plans for memory count it, and checkpoints are checked for it."""
    is_matrix = name == "muon's matrix"
    options = Optimizer(name=name.partition("'")[0], momentum=0.9 if name == "sgd" else 0.0)  # type: ignore[arg-type]
    parameter = nn.Parameter(torch.ones(3, 1))
    parameter.grad = torch.ones(3, 1)
    optimizer = make_optimizer(options, 0.1, [parameter], matrices=[is_matrix])
    assert optimizer is not None
    update(optimizer)
    state = optimizer.state[parameter]
    assert set(state) == state_names(options, is_matrix)
    kept = sum(value.numel() == 3 for value in state.values())
    assert kept == (1 if is_matrix else values_kept(options))
    assert {key for key, value in state.items() if value.numel() == 1} == state_names(options, is_matrix) & SCALARS


def test_lion() -> None:
    """Two steps by hand."""
    x = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Lion([x], lr=0.1, betas=(0.5, 0.75), weight_decay=0.5)
    for gradient, expected in (([3.0, -1.0], [0.85, -1.8]), ([-2.0, -8.0], [0.9075, -1.61])):
        x.grad = torch.tensor(gradient)
        optimizer.step()
        assert x.tolist() == pytest.approx(expected)


def test_lion_follows_its_momentum() -> None:
    """Algorithm 2 of the paper, with gradients that change their signs: what came before outweighs one of them."""
    torch.manual_seed(5)
    x, mean = nn.Parameter(torch.randn(50)), torch.zeros(50)
    theirs = x.detach().clone()
    optimizer = Lion([x], lr=0.1, betas=(0.9, 0.75), weight_decay=0.5)
    against = 0
    for _ in range(6):
        x.grad = torch.randn(50)
        update = (0.9 * mean + 0.1 * x.grad).sign()
        against += int((update != x.grad.sign()).sum())
        theirs = theirs - 0.1 * (update + 0.5 * theirs)
        mean = 0.75 * mean + 0.25 * x.grad
        optimizer.step()
    assert against > 50
    assert torch.allclose(x, theirs)


def test_lion_takes_complex_numbers_as_two_real_ones() -> None:
    values = torch.randn(2, 3, 2)
    x, pairs = nn.Parameter(torch.view_as_complex(values.clone())), nn.Parameter(values.clone())
    optimizers = [Lion([one], lr=0.1, betas=(0.5, 0.75), weight_decay=0.5) for one in (x, pairs)]
    for _ in range(3):
        pairs.grad = torch.randn(2, 3, 2)
        x.grad = torch.view_as_complex(pairs.grad.clone())
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(torch.view_as_real(x), pairs)


def test_muon_makes_updates_orthogonal() -> None:
    for shape in (6, 9), (9, 6), (1, 4), (5, 1):
        for kind in (torch.float32, torch.complex64):
            found = torch.linalg.svdvals(orthogonal(torch.randn(shape, dtype=kind)))
            assert found.min() > 0.5
            assert found.max() < 1.3
    assert orthogonal(torch.zeros(3, 4)).tolist() == torch.zeros(3, 4).tolist()


@pytest.mark.parametrize(("momentum", "own"), [(0.95, {}), (0.6, {"betas": (0.7, 0.9), "eps": 0.01, "muon_momentum": 0.6})])
def test_muon(momentum: float, own: dict[str, Any]) -> None:
    """Matrices as torch's Muon updates them, which computes in bfloat16, the others as AdamW."""
    values = torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(-1, 1, 5)
    (matrix, vector), theirs = ([nn.Parameter(v.clone()) for v in values] for _ in range(2))
    options = Optimizer(name="muon", weight_decay=0.1, **own)
    optimizer = make_optimizer(options, 0.02, [matrix, vector], matrices=[True, False])
    muon = torch.optim.Muon([theirs[0]], lr=0.02, weight_decay=0.1, momentum=momentum, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([theirs[1]], lr=0.02, weight_decay=0.1, betas=options.betas, eps=options.eps)
    assert optimizer is not None
    for step in range(4):
        torch.manual_seed(step)
        for mine, other in zip((matrix, vector), theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        update(optimizer)
        muon.step()
        adamw.step()
    assert torch.equal(vector, theirs[1])
    assert (matrix - theirs[0]).abs().max() < 0.02 * (matrix - values[0]).abs().max()


def test_matrices_of_layers() -> None:
    layers = [
        nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2),
        nn.MultiheadAttention(4, 2), nn.Conv1d(2, 2, 3),
    ]  # fmt: skip
    found = matrices(layers)
    named = [f"{n}.{name}" for n, layer in enumerate(layers) for name, _ in layer.named_parameters()]
    ids = [id(parameter) for layer in layers for parameter in layer.parameters()]
    assert [name for name, one in zip(named, ids, strict=True) if one in found] == [
        "1.0.weight", "2.weight", "4.in_proj_weight", "4.out_proj.weight", "5.weight"
    ]  # fmt: skip


def test_adamw_for_some_matrices() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    groups = [ParameterGroup(names=["head.*"], adamw=True, lr=0.5)]
    made = make_optimizer(Optimizer(name="muon"), 0.1, parameters, [["a.weight"], ["head.weight"]], groups, [True, True])
    assert made is not None
    assert [(group["matrix"], group["usual"]) for group in made.param_groups] == [(True, 0.1), (False, 0.5)]


def test_corrected_updates() -> None:
    """x - u(t) - (u(t) - u(t-1)); the first one, and the first after a step without a gradient, are plain."""
    x = nn.Parameter(torch.tensor([10.0]))
    optimizer, correction = torch.optim.SGD([x], lr=1.0), Correction(True)
    for gradient, expected in ((1.0, 9.0), (3.0, 9 - 3 - 2), (2.0, 4 - 2 + 1), (None, 3.0), (2.0, 1.0), (1.0, 1.0)):
        x.grad = None if gradient is None else torch.tensor([gradient])
        with correction.around([x]):
            update(optimizer)
        assert x.item() == expected


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "nadam"])
def test_updates_are_torchs(name: str) -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    options = Optimizer(name=name, momentum=0.9, weight_decay=0.1)  # type: ignore[arg-type]
    optimizer = make_optimizer(options, 0.1, [ours])
    assert optimizer
    kind = {
        "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
        "nadam": partial(torch.optim.NAdam, decoupled_weight_decay=True),
    }[name]  # fmt: skip
    extra = (
        {"momentum": 0.9, "nesterov": options.nesterov} if name == "sgd" else {"betas": options.betas, "eps": options.eps}
    )
    plain = kind([theirs], lr=0.1, weight_decay=options.weight_decay, **extra)  # type: ignore[arg-type]
    for step in range(3):
        ours.grad, theirs.grad = (torch.arange(7.0) * (step - 1) for _ in range(2))
        update(optimizer)
        plain.step()
        assert ours.grad is None
    assert torch.equal(ours, theirs)


def test_training_does_not_wait_for_the_compiler() -> None:
    """Importing it takes as long as importing torch, and happens in torch's own optimizers."""
    code = """
import sys, torch, test_stage
for schedule in "1f1b", "1f1b-async", "zero-bubble":
    stage = test_stage.make([torch.nn.Linear(4, 3)], schedule)
    stage.forward(0, 0, (test_stage.received(2, 4),))
    stage.backward(0, 0, (torch.ones(2, 3),))
    if schedule == "zero-bubble":
        stage.weight_gradient(0, 0)
    stage.update(0.1, 0)
    stage.optimizer_state()
assert "torch._dynamo.utils" not in sys.modules
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "unit" / "pipeline")])
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": path}, timeout=HANGS)
