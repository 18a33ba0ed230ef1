"""``accept_mpi bench single``: one rank against a plain PyTorch loop of the same arithmetic, in turn on the same machine.

"plain" is the loop as most people write it; "plain, tuned" is the same with channels_last and the allocator settings that
accept_mpi uses by default. All accumulate the same micro-batches of digits, with the same threads.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from accept_mpi import models
from accept_mpi.errors import UserError
from accept_mpi.registry import find_function

_BATCH, _MICRO_BATCHES = 64, 8
_SECONDS = 600  # time limit of a measurement
_JOB = """
[model]
name = "{model}"
[data]
name = "digits"
args = {{ size = 32 }}
[train]
batch_size = {batch}
micro_batches = {micro}
steps = {steps}
evaluate_every = 0
optimizer = {{ name = "sgd", lr = 0.01, momentum = 0.9 }}
[output]
directory = "run"
"""


def main(options: argparse.Namespace) -> int:
    """Measure all in turn, and print samples/s and ratios to "plain"."""
    find_function(options.model, models.ZOO, "--model")
    rates: dict[str, list[float]] = {"plain": [], "plain, tuned": [], "accept_mpi, 1 rank": []}
    for _ in range(options.repeats):
        for name, found in rates.items():
            found.append(_ours(options) if name.startswith("accept") else _plain(options, "tuned" in name))
    base = rates["plain"]
    print(
        f"{options.model}, batch {_BATCH} in {_MICRO_BATCHES} micro-batches, {options.repeats} x {options.steps} steps each"
    )
    print(f"{'':20}{'samples/s':>10}{'spread':>14}{'ratio':>8}   (median of ratios within a repeat)")
    for name, found in rates.items():
        ratio = statistics.median(a / b for a, b in zip(found, base, strict=True))
        print(f"{name:20}{statistics.median(found):10.1f}{min(found):8.1f}-{max(found):.1f}{ratio:8.2f}")
    return 0


def _ours(options: argparse.Namespace) -> float:
    from accept_mpi.logs.reader import open_log

    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text(_JOB.format(model=options.model, batch=_BATCH, micro=_MICRO_BATCHES, steps=options.steps + 1))
        _run([sys.executable, "-m", "accept_mpi", "train", str(job), "--quiet"], folder)
        with open_log(Path(folder) / "run" / "log.h5") as log:
            ends = log["steps"]["end"]
    return float(_BATCH * options.steps / (ends[-1] - ends[0]))


def _plain(options: argparse.Namespace, tuned: bool) -> float:
    arguments = [options.model, str(options.steps), "tuned" if tuned else "plain"]
    return float(_run([sys.executable, "-m", "accept_mpi.cli.bench_single", *arguments], None).split()[-1])


def _run(command: Sequence[str], folder: str | None) -> str:
    import os

    checkout = str(Path(__file__).resolve().parent.parent.parent)
    path = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH"), os.getcwd()]))  # for a user's model
    environment = os.environ | {"PYTHONPATH": path}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"bench single: a measurement takes more than {_SECONDS} s; take fewer --steps") from None
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise UserError(f"bench single: {' '.join(command[1:])} failed: {last[-1].removeprefix('accept_mpi: ')}")
    return done.stdout


def _plain_loop(model_name: str, steps: int, tuned: bool) -> float:
    """Train with the plain loop, in this process; returns samples/s over all steps but the first."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accept_mpi import data, models
    from accept_mpi.device.allocator import keep_memory

    if tuned:
        keep_memory()
    train, _ = data.load("digits", {"size": 32})
    everything = torch.arange(len(train)).numpy()
    inputs = train.inputs(everything)
    assert isinstance(inputs, torch.Tensor)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(inputs, train.targets(everything)), _BATCH, shuffle=True, drop_last=True)
    model = models.load(model_name, {}, 0).whole(0)
    if tuned:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    done, began = 0, 0.0
    while True:
        for x, y in loader:
            if tuned:
                x = x.contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            for part, target in zip(x.chunk(_MICRO_BATCHES), y.chunk(_MICRO_BATCHES), strict=True):
                (torch.nn.functional.cross_entropy(model(part), target) / _MICRO_BATCHES).backward()
            optimizer.step()
            done += 1
            if done == 1:
                began = time.perf_counter()
            if done == steps + 1:
                return _BATCH * steps / (time.perf_counter() - began)


if __name__ == "__main__":
    print(_plain_loop(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "tuned"))
