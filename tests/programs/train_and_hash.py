"""``train_all.py``, which also prints a hash of what each rank's parameters are in the end."""

import runpy
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from accept_mpi.training.worker import Worker

plain_train = Worker.train


def hashing(worker: Worker, *args: Any) -> int:
    made = plain_train(worker, *args)
    found = sha256()
    for parameter in worker.stage.parameters:
        found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    sys.stdout.write(f"weights {found.hexdigest()}\n")
    sys.stdout.flush()
    return made


Worker.train = hashing  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("train_all.py")))
