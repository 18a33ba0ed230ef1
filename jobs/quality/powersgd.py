"""What PowerSGD costs in learning: torch's own hook of DistributedDataParallel, four processes, on the samples of a job of
this folder in the order in which ours takes them, with its optimizer, rates and clipping. Leaves training losses by step,
one row a seed, in runs/quality/JOB-powersgd/RANK.npy, and prints test losses. Rank 0: whole gradients (plain DDP).

PYTHONPATH=. python jobs/quality/powersgd.py jobs/quality/gpt-muon.toml --seeds 0 1 2 --ranks 1 0
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accept_mpi import models
from accept_mpi.data import Dataset, fetch
from accept_mpi.data import of_job as data_of
from accept_mpi.data.calendar import Calendar, in_order, micro_batches_of
from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.models.losses import loss_of
from accept_mpi.pipeline.muon import matrices
from accept_mpi.pipeline.optimizer import learning_rate, make_optimizer, set_learning_rate

PROCESSES = 4
PLAIN_STEPS = 2  # first steps, in which whole gradients are sent, as in the experiments
SMOOTHED = 40


def train(number: int, job: Job, rank: int, store: str, out: str) -> None:
    """One process: train, and on the first write the loss of each step and that of the test set."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, PROCESSES), rank=number, world_size=PROCESSES)
    chain = models.load(job.model.name, job.model.args, job.train.seed)
    module = nn.Sequential(*chain.build_range(0, len(chain), job.train.seed))
    layers = zip(chain.names, module, strict=True)
    named = {f"{name}.{key}": value for name, layer in layers for key, value in layer.named_parameters()}
    found, parameters = matrices([module]), list(named.values())
    optimizer = make_optimizer(
        job.train.optimizer, job.lr, parameters, [[name] for name in named], job.train.groups,
        [id(value) in found for value in parameters],
    )  # fmt: skip
    assert optimizer is not None
    model = DistributedDataParallel(module, bucket_cap_mb=1000)  # one bucket, as in harness.ddp
    if rank:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=PLAIN_STEPS)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    data, test = data_of(job)
    loss = loss_of(job).function
    sizes = job.train.batch_size, micro_batches_of(job)
    calendar = Calendar(len(data), *sizes, job.train.seed, job.train.drop_last)
    steps, losses = job.train.steps or calendar.end(job.train.epochs or 1), []
    for step in range(steps):
        batch = np.concatenate(calendar.indices(step))
        mine = np.array_split(batch, PROCESSES)[number]
        samples = fetch(data, mine, 0, inputs=True, targets=True)
        set_learning_rate(optimizer, learning_rate(job.train.optimizer, job.lr, step, steps))
        optimizer.zero_grad()
        value = loss(model(samples.inputs), samples.targets) * (len(mine) * PROCESSES / len(batch))
        value.backward()
        if job.train.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, job.train.clip_norm)
        optimizer.step()
        told = value.detach().clone()
        dist.all_reduce(told)
        losses.append(float(told) / PROCESSES)
    if number == 0:
        np.save(out, np.array([*losses, tested(module, test, loss, job.train.batch_size)]))
    dist.destroy_process_group()


def tested(module: nn.Module, test: Dataset, loss: Callable[..., torch.Tensor], size: int) -> float:
    """Mean loss over the test set."""
    module.eval()
    total = 0.0
    with torch.no_grad():
        for indices in in_order(len(test), size):
            samples = fetch(test, indices, None, inputs=True, targets=True)
            total += len(indices) * float(loss(module(samples.inputs), samples.targets))
    return total / len(test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    out = Path("runs/quality") / f"{options.job.stem}-powersgd"
    out.mkdir(parents=True, exist_ok=True)
    for rank in options.ranks:
        rows = []
        for seed in options.seeds:
            job = parse(options.job.read_text(), str(options.job), [*options.set, f"train.seed={seed}"])
            with tempfile.TemporaryDirectory() as folder:
                given = job, rank, f"{folder}/store", f"{folder}/losses.npy"
                multiprocessing.spawn(train, given, PROCESSES)
                rows.append(np.load(f"{folder}/losses.npy"))
            last = rows[-1][-1 - SMOOTHED : -1].mean()
            print(f"rank {rank}, seed {seed}: test loss {rows[-1][-1]:.4f}, last steps {last:.4f}", flush=True)
        np.save(out / f"{rank}.npy", np.stack(rows)[:, :-1])
        tests = np.array([row[-1] for row in rows])
        error = tests.std(ddof=min(1, len(tests) - 1)) / len(tests) ** 0.5
        print(f"rank {rank}: test loss {tests.mean():.4f}, one standard error {error:.4f}")


if __name__ == "__main__":
    main()
