"""Run under mpirun by the fixture ``trained``: several ``train`` commands one after another, each as if in a new process.

``train_each.py FOLDER``: command lines are in FOLDER/jobs; what the k-th prints goes to FOLDER/k.out, its exit code to
FOLDER/k.code. A job that ends its ranks (an error of one rank alone) leaves no such code. Ends after a job that has left
something behind which cannot be undone.
"""

import gc
import importlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from accept_mpi.cli import main

_LIBRARIES = tuple({str(Path(sys.modules[name].__file__ or "").parents[1]) for name in ("os", "numpy", "accept_mpi")})
_SIGNALS = [number for number in signal.Signals if signal.getsignal(number) is not None]
_THREADS_END = 10.0


class Fresh:
    """What a process has when it begins, to have it again."""

    def __init__(self) -> None:
        self.folder, self.environment, self.path = os.getcwd(), dict(os.environ), list(sys.path)
        self.modules, self.threads = set(sys.modules), set(threading.enumerate())
        self.handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        gc.collect()
        gc.freeze()
        self.dtype, self.torch_seed = torch.get_default_dtype(), torch.initial_seed()

    def again(self) -> bool:
        """Whether all is as it was."""
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.path
        for name, module in list(sys.modules.items()):
            file = vars(module).get("__file__")  # not getattr, which makes lazy modules load
            if name not in self.modules and (file is None or not file.startswith(_LIBRARIES)):
                del sys.modules[name]
            elif registry := vars(module).get("__warningregistry__"):
                registry.clear()
        importlib.invalidate_caches()
        for number, handler in self.handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        torch.set_num_threads(1)
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)
        torch.manual_seed(self.torch_seed)
        np.random.seed()
        random.seed()
        gc.collect()
        until = time.monotonic() + _THREADS_END
        while left := set(threading.enumerate()) - self.threads:
            if time.monotonic() > until:
                print("train_each.py: left behind:", *left, file=sys.__stderr__, flush=True)
                return False
            time.sleep(0.005)
        return True


def train(words: list[str], out: Path) -> int:
    """Exit code of ``accept_mpi train *words``, whose output goes to ``out``, all ranks' together."""
    kept = [os.dup(number) for number in (1, 2)]
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    try:
        code = main(["train", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    for number, before in zip((1, 2), kept, strict=True):
        os.dup2(before, number)
        os.close(before)
    return code


def run(notes: Path) -> None:
    world, finalize = MPI.COMM_WORLD, MPI.Finalize
    MPI.Finalize = lambda: None  # what Runtime.finish ends with; another job may come
    lines = json.loads((notes / "jobs").read_text())
    fresh = Fresh()
    for number, words in enumerate(lines):
        code = train(words, notes / f"{number}.out")
        codes = world.allgather(code)
        if world.rank == 0:
            (notes / f"{number}.code").write_text(str(next(filter(None, codes), 0)))
        if number < len(lines) - 1 and not all(world.allgather(fresh.again())):
            break
    finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever threads are left


run(Path(sys.argv[1]))
