"""Sparse gradients, which not every optimizer takes."""

import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.pipeline.optimizer import make_optimizer, update
from accept_mpi.pipeline.stage import Stage


def find_sparse(stage: Stage) -> None:
    """Note which gradients that are there are sparse."""
    here = {n: p.grad for n, p in enumerate(stage.parameters) if p.grad is not None}
    stage.found.sparse |= {n: gradient for n, gradient in here.items() if gradient.layout is not torch.strided}


def check_sparse(stage: Stage) -> None:
    """Raise UserError if the job's optimizer, or clipping, does not take the sparse gradients that were found."""
    train = stage.job.train
    for n, gradient in stage.found.sparse.items():
        name, alike = stage.own.whole[n], nn.Parameter(stage.parameters[n].detach().clone())
        alike.grad = gradient.clone()
        try:
            if train.clip_norm is not None:
                torch.linalg.vector_norm(gradient)
            optimizer = make_optimizer(train.optimizer, stage.job.lr, [alike], [name], train.groups)
            assert optimizer is not None
            update(optimizer)
        except RuntimeError as error:  # which torch raises for kinds of tensors that a function does not take
            raise UserError(
                f'{name[0]} has a sparse gradient (sparse=True), which train.optimizer.name = "{train.optimizer.name}" '
                'with these settings, or train.clip_norm, does not take; "sgd" without weight decay does'
            ) from error
