"""The arithmetic of schedules with older weights in one process, for their tests."""

from collections.abc import Callable

import samples
import torch
from torch.func import functional_call

from accept_mpi.plan import even_cuts
from accept_mpi.seeds import forward_seed


def replay(
    job: dict, stages: int, slack: int, vertical_sync: bool, cuts: list[int] | None = None, sizes: list[int] | None = None
) -> dict[str, torch.Tensor]:
    """Micro-batch by micro-batch: each stage computes with the version of its weights that the schedule gives it.

    Stage s admits d = P - s + slack * (P - 1 - s) micro-batches before its first backward, then one after each backward, so
    i - d + 1 backwards are done when the forward of micro-batch i begins, and as many updates as steps end among those. A
    stage that a group of equal devices holds (``sizes``) counts in P - s once per device, and updates as many micro-batches
    later as it has devices; the last stage, whoever holds it, before any forward of the next step. ``vertical_sync``: all
    stages use the newest version that all of them have.
    """
    plain, train = samples.plain(job), job["train"]
    layers = list(plain.model)
    edges = [0, *(even_cuts(len(layers), stages) if cuts is None else cuts), len(layers)]
    width = sizes or [1] * stages
    stage_of = [next(s for s in range(stages) if edges[s] <= i < edges[s + 1]) for i in range(len(layers))]
    versions = [[[p.detach().clone() for p in layer.parameters()]] for layer in layers]
    optimizers = [
        torch.optim.SGD(list(p.parameters()), lr=0.05, momentum=0.9, weight_decay=5e-4)
        for p in layers
        if list(p.parameters())
    ]
    micro = [plain.micro_batches(step, train["batch_size"], train["micro_batches"]) for step in range(train["steps"])]
    ends, i = [], 0
    for batch in micro:
        ends.append((ends[-1] if ends else 0) + len(batch))
    for step, batch in enumerate(micro):
        for k, indices in enumerate(batch):
            leaves = []
            x = plain.train_set.inputs(indices)
            if x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            for index, layer in enumerate(layers):
                made = []
                for s in range(stages) if vertical_sync else [stage_of[index]]:
                    backwards = i - (sum(width[s:]) + slack * (stages - 1 - s)) + 1
                    done = i if s == stages - 1 else backwards - (width[s] if width[s] > 1 else 0)
                    made.append(sum(end <= done for end in ends))
                version = min(made)
                names = [name for name, _ in layer.named_parameters()]
                used = {n: p.clone().requires_grad_() for n, p in zip(names, versions[index][version], strict=True)}
                leaves.append(list(used.values()))
                torch.manual_seed(forward_seed(plain.seed, step, k, index))
                x = functional_call(layer, used, (x,))
            loss = plain.loss(x, plain.train_set.targets(indices)) * (len(indices) / sum(map(len, batch)))
            gradients = iter(torch.autograd.grad(loss, [leaf for of_layer in leaves for leaf in of_layer]))
            for layer in layers:
                for p in layer.parameters():
                    g = next(gradients)
                    p.grad = g.clone() if p.grad is None else p.grad + g
            i += 1
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for index, layer in enumerate(layers):
            versions[index].append([p.detach().clone() for p in layer.parameters()])
    return plain.model.state_dict()


def delayed(
    job: dict, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], corrected: bool = False,
    clip_norm: float | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """ "1f1b-delayed": a step computes with the weights from before the last update but one. ``corrected``: updates are
    x - u(t) - (u(t) - u(t-1))."""
    plain, train = samples.plain(job), job["train"]
    parameters = list(plain.model.parameters())
    optimizer = make(parameters)
    newest = [p.detach().clone() for p in parameters]
    earlier, last = newest, None
    for step in range(train["steps"]):
        for p, value in zip(parameters, earlier, strict=True):
            p.data = value
        batch = plain.micro_batches(step, train["batch_size"], train["micro_batches"])
        for k, indices in enumerate(batch):
            x = plain.forward(step, k, plain.train_set.inputs(indices))
            loss = plain.loss(x, plain.train_set.targets(indices)) * (len(indices) / sum(map(len, batch)))
            loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        for p, value in zip(parameters, newest, strict=True):
            p.data = value.clone()
        optimizer.step()
        optimizer.zero_grad()
        updates = [old - p.detach() for old, p in zip(newest, parameters, strict=True)]
        if corrected and last is not None:
            for p, update, before in zip(parameters, updates, last, strict=True):
                p.data -= update - before
        earlier, newest, last = newest, [p.detach().clone() for p in parameters], updates
    for p, value in zip(parameters, newest, strict=True):
        p.data = value
    return plain.model.state_dict()
