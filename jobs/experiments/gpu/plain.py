"""What a user would write: a plain PyTorch loop over a job's model, micro-batches and learning rate."""

import time

import torch
from torch import nn

from accept_mpi import data, models
from accept_mpi.data.calendar import Calendar, micro_batches_of
from accept_mpi.job import Job


def loop(
    job: Job, steps: int, device: str, dtype: torch.dtype = torch.float32, nudge: float = 0.0
) -> tuple[list[float], list[float]]:
    """Seconds and losses of its steps. Its weights are first multiplied by 1 + ``nudge`` times normal values."""
    chain = models.load(job.model.name, job.model.args, job.train.seed)
    model = chain.whole(job.train.seed).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + nudge * torch.randn(parameter.shape, dtype=dtype, generator=generator))
    image = any(isinstance(module, nn.Conv2d) for module in model.modules())
    layout = torch.channels_last if image else torch.contiguous_format
    model.to(device).to(memory_format=layout)  # type: ignore[call-overload]
    samples, _ = data.load(job.data.name, job.data.args, job.model)
    parts = micro_batches_of(job)
    calendar = Calendar(len(samples), job.train.batch_size, parts, job.train.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=job.train.optimizer.momentum)
    took, losses = [], []
    for step in range(steps):
        began, total = time.perf_counter(), torch.zeros((), device=device, dtype=dtype)
        for indices in calendar.indices(step):
            x, y = samples.inputs(indices).to(device), samples.targets(indices).to(device)
            if image:
                x = x.to(dtype).contiguous(memory_format=torch.channels_last)
            output = model(x)
            loss = nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), y.reshape(-1)) / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
        took.append(time.perf_counter() - began)
    return took, losses
