"""The common parts of the peers' programs: our job's model code, data, batches and optimizer in plain PyTorch."""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from accept_mpi import data, models
from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.device.allocator import keep_memory
from accept_mpi.job_file import parse
from accept_mpi.pipeline.muon import matrices
from accept_mpi.pipeline.optimizer import make_optimizer
from accept_mpi.plan import even_cuts
from harness.session import points

_FIRST_STEPS = 5  # steps of a process that do not count: memory comes from the kernel, oneDNN chooses its routines


class Setting:
    """A job as a peer runs it. ``tuned``: with our memory settings (glibc's allocator, channels_last)."""

    def __init__(self, point: dict[str, Any]) -> None:
        self.job = parse(Path(point["job"]).read_text(), point["job"], tuple(point.get("set", ())))
        self.tuned = bool(point["tuned"])
        if self.tuned:
            keep_memory()  # holds for the whole process
        self.chain = models.load(self.job.model.name, self.job.model.args, self.job.train.seed)
        self.batch, self.micro_batches = self.job.train.batch_size, micro_batches_of(self.job)
        self.train, self.test = data.load(self.job.data.name, self.job.data.args)
        torch.manual_seed(self.job.train.seed)

    def edges(self, stages: int, cuts: list[int] | None = None) -> list[tuple[int, int]]:
        """Layers (first, last + 1) of each stage, split at ``cuts`` or evenly."""
        return list(itertools.pairwise([0, *(cuts or even_cuts(len(self.chain), stages)), len(self.chain)]))

    def layers(self, start: int, stop: int) -> nn.Sequential:
        """Layers ``start`` to ``stop`` - 1 of the model, in this setting's memory format."""
        built = nn.Sequential(*self.chain.build_range(start, stop, self.job.train.seed))
        return self.format(built)

    def format(self, what: Any) -> Any:
        """Convert a module or a batch of images to this setting's memory format."""
        image = isinstance(what, nn.Module) or what.dim() == 4
        return what.to(memory_format=torch.channels_last) if self.tuned and image else what

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer that the job names, for this module: torch's, or ours of those that torch has not, so that peers
        make the same updates. ``train.groups`` are left out, since stages have other names here."""
        given, parameters = self.job.train.optimizer, list(module.parameters())
        found = matrices([module]) if given.name == "muon" else set()
        own = make_optimizer(given, self.job.lr, parameters, matrices=[id(one) in found for one in parameters])
        assert own is not None
        return own

    def batches(self, share: slice = slice(None)) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """An endless series of shuffled batches (inputs, targets), the same on all ranks; ``share`` takes a part of each."""
        # A separate generator: on some ranks dropout also draws from the global one.
        shuffle = torch.Generator().manual_seed(self.job.train.seed)
        while True:
            order = torch.randperm(len(self.train), generator=shuffle).numpy()
            for first in range(0, len(order) - self.batch + 1, self.batch):
                chosen = order[first : first + self.batch][share]
                inputs = self.train.inputs(chosen)
                assert isinstance(inputs, torch.Tensor)
                yield self.format(inputs), self.train.targets(chosen)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over images, or over all positions of texts."""
    return nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def join() -> tuple[int, int]:
    """Join gloo's process group over the lab's network; returns rank and size."""
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['TMPDIR']}/gloo-{os.environ['ACCEPT_LAB_RUN']}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return rank, size


def timed(step: Callable[[], None], steps: int, warm: int) -> float:
    """Seconds per step of all ranks together, from barrier to barrier, after ``warm`` steps that do not count."""
    for _ in range(warm):
        step()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - began) / steps


class Trial(NamedTuple):
    """A system that is ready to train."""

    setting: Setting
    step: Callable[[], None]
    """Trains one step; all ranks call it together."""
    whole: Callable[[], nn.Module | None]
    """Gives the whole trained model on rank 0, None elsewhere."""


def serve(build: Callable[[dict[str, Any], int, int], Trial]) -> None:
    """Measure a session's points; ``build`` makes a trial from a point, rank and size.

    A point has the keys that ``build`` needs, and ``steps`` and ``warm``; or, instead of these two, ``until`` (a test
    accuracy) and ``seconds``, to train from the beginning until either is reached.
    """
    rank, size = join()
    built: dict[str, Trial] = {}
    for point, answer in points():
        if "until" in point:
            answer(trained(build(point, rank, size), point["until"], point["seconds"]))
            continue
        name = json.dumps({key: value for key, value in point.items() if key not in ("steps", "warm")}, sort_keys=True)
        warm = point["warm"] if name in built else max(point["warm"], _FIRST_STEPS)
        trial = built[name] = built.get(name) or build(point, rank, size)
        answer({"samples_per_s": trial.setting.batch / timed(trial.step, point["steps"], warm)})
    dist.destroy_process_group()


def trained(trial: Trial, until: float, seconds: float) -> dict[str, Any]:
    """Train until the test accuracy reaches ``until`` or ``seconds`` have passed, not counting evaluation. The result has
    samples/s and (seconds, accuracy) after every epoch."""
    setting = trial.setting
    epoch = len(setting.train) // setting.batch
    found: list[list[float]] = []
    passed = 0.0
    while passed < seconds:
        passed += epoch * timed(trial.step, epoch, 0)
        model, told = trial.whole(), torch.zeros(1)
        if model is not None:
            told[0] = accuracy(setting, model)
        dist.broadcast(told, 0)
        found.append([passed, float(told)])
        if float(told) >= until:
            break
    return {"samples_per_s": setting.batch * epoch * len(found) / passed, "evals": found}


@torch.no_grad()
def accuracy(setting: Setting, model: nn.Module) -> float:
    """Share of the test set that the model classifies correctly."""
    model.eval()
    hits = 0
    for first in range(0, len(setting.test), setting.batch):
        chosen = torch.arange(first, min(first + setting.batch, len(setting.test))).numpy()
        inputs = setting.test.inputs(chosen)
        hits += int((model(setting.format(inputs)).argmax(-1) == setting.test.targets(chosen)).sum())
    model.train()
    return hits / len(setting.test)
