"""A plain PyTorch loop over the micro-batches of a job: ``python plain.py JOB.toml OUT.pt``."""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from accept_mpi.data import fetch
from accept_mpi.data import load as load_data
from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.models import Whole, model_of
from accept_mpi.seeds import ORDER, mix


def made(job: Job) -> nn.Module:
    """The model itself."""
    found = model_of(job)
    assert isinstance(found, Whole)
    return found.make()


def forward(model: nn.Module, x: object, output: str) -> torch.Tensor:
    result = model(**x) if isinstance(x, dict) else model(x)
    return result[output or "logits"] if isinstance(result, dict) else result


def main(path: Path, out: Path) -> None:
    job = parse(path.read_text(), str(path))
    model, (data, _), train = made(job), load_data(job.data.name, job.data.args, job.model), job.train
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=train.optimizer.momentum)
    for step in range(train.steps or 0):
        per_epoch = -(-len(data) // train.batch_size)
        order = np.random.Generator(np.random.Philox(mix(ORDER, train.seed, step // per_epoch))).permutation(len(data))
        batch = order[step % per_epoch * train.batch_size :][: train.batch_size]
        size = -(-train.batch_size // train.micro_batches)
        for part in (batch[begin : begin + size] for begin in range(0, len(batch), size)):
            samples = fetch(data, part, 0, inputs=True, targets=True)
            output = forward(model, samples.inputs, job.model.output)
            if job.model.output == "loss":
                loss = output
            elif train.loss == "mse":
                loss = nn.functional.mse_loss(output, samples.targets)
            else:
                loss = nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), samples.targets.reshape(-1))
            (loss * (len(part) / len(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
