"""Models as their libraries have them, with random weights: how long recording takes, how many layers result, and whether
1 to 4 ranks compute what the plain model computes, bit for bit. torch.distributed.pipelining is given the same models.

Needs no lab, but transformers, timm and torchvision beside the rest (``pip install transformers``, and with ``--no-deps``
``timm torchvision==0.28.0``).
"""

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from models import MODELS, Model

from accept_mpi.data import load as load_data
from accept_mpi.job_file import parse
from accept_mpi.launch import mpirun
from accept_mpi.models import Whole, model_of
from accept_mpi.models.base import Chain
from accept_mpi.models.shared import uncuttable
from accept_mpi.profiling.layer_timer import micro_batch
from accept_mpi.recovery.checkpoint import Checkpoint
from harness.store import table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OUT = Path("runs/experiments/unmodified").resolve()
PATHS = (HERE / "operators", ROOT, HERE, ROOT / "tests")
_DEADLINE = 600.0
_RANKS = (1, 2, 3, 4)

JOB = """
[model]
name = "{name}"
output = "{output}"
[model.args]
{args}
[data]
name = "{data}"
[train]
batch_size = 8
micro_batches = 4
steps = 3
evaluate_every = 0
loss = "{loss}"
memory_format = "contiguous"
optimizer = {{ name = "sgd", lr = 0.05, momentum = 0.9 }}
[pipeline]
cuts = "even"
lanes = "off"
[output]
directory = "{directory}"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="models with this in their title")
    only = parser.parse_args().only
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    rows = []
    for model in (model for model in MODELS if only in model.title):
        rows.append(measure(model))
        print(rows[-1], flush=True)
    taken = sum(row[-1] == "yes" for row in rows)
    exact = sum(row[5] == "yes" for row in rows)
    head = [
        "model",
        "parameters",
        "layers",
        "seconds to record",
        "most bytes at a cut",
        "equal on 1 to 4 ranks",
        "torch's pipelining",
    ]
    text = table(head, rows) + f"\n{exact} of {len(rows)} here, {taken} with torch.distributed.pipelining.\n"
    (OUT / "table.md").write_text(text)
    print(f"\n{text}\n{OUT / 'table.md'}")


def measure(model: Model) -> list[Any]:
    """The row of a model."""
    folder = OUT / "".join(c if c.isalnum() else "-" for c in model.name)
    folder.mkdir()
    path = folder / "job.toml"
    module = "recorded_nets" if model.data in ("pictures", "sentences") else "models"
    args = "\n".join(f"{key} = {json.dumps(value)}" for key, value in model.args.items())
    loss = "mse" if model.data == "pictures" else "cross_entropy"
    path.write_text(
        JOB.format(
            name=model.name,
            output=model.output,
            args=args,
            data=f"{module}:{model.data}",
            loss=loss,
            directory=folder / "run",
        )
    )
    job = parse(path.read_text(), str(path))
    batch = micro_batch(load_data(job.data.name, job.data.args, job.model)[0], job)
    found = model_of(job)
    assert isinstance(found, Whole), model.name
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        chain = found.record(batch.value)
        seconds.append(time.monotonic() - began)
    parameters = sum(p.numel() for p in found.make().parameters())
    run([sys.executable, str(HERE / "plain.py"), str(path), str(folder / "plain.pt")], folder)
    expected = torch.load(folder / "plain.pt")
    wrong = [ranks for ranks in _RANKS if not equal(chain, path, folder, ranks, expected)]
    peer = run([sys.executable, str(HERE / "peer.py"), str(path), *model.splits], folder, check=False)
    answer = next((line.removeprefix("ANSWER ") for line in peer.splitlines() if line.startswith("ANSWER ")), "no answer")
    same = "yes" if not wrong else f"not on {wrong}"
    return [
        model.title,
        parameters,
        len(chain),
        f"{sorted(seconds)[1]:.2f}",
        crossing(chain, batch.value),
        same,
        answer[:110],
    ]


def crossing(chain: Chain, value: Any) -> int:
    """Most bytes of tensors that a layer passes on, for a micro-batch."""
    most = 0
    for layer in chain.build_range(0, len(chain), 0)[:-1]:
        value = layer(value)
        most = max(most, sum(one.nbytes for one in value[1:]))
    return most


def equal(chain: Chain, path: Path, folder: Path, ranks: int, expected: dict[str, torch.Tensor]) -> bool:
    """Train on so many ranks, cut evenly among the possible cuts; True if the weights are the plain loop's."""
    possible = [cut for cut in range(1, len(chain)) if cut not in uncuttable(chain.shared(), len(chain), True)]
    cuts = [possible[n * len(possible) // ranks] for n in range(1, ranks)]
    shutil.rmtree(folder / "run", ignore_errors=True)
    run(
        [
            mpirun.path(),
            "-n",
            str(ranks),
            sys.executable,
            "-m",
            "accept_mpi",
            "train",
            str(path),
            "--set",
            f"pipeline.cuts={cuts}",
        ],
        folder,
    )
    state = Checkpoint(folder / "run").whole()
    return set(state) == set(expected) and all(torch.equal(state[name], value) for name, value in expected.items())


def run(command: list[str], folder: Path, check: bool = True) -> str:
    """Run a command; returns what it prints."""
    more = {"PYTHONPATH": os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=os.environ | more, capture_output=True, text=True, timeout=_DEADLINE, check=False
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.path[:0] = map(str, PATHS)
    operators = runpy.run_path(str(HERE / "operators" / "sitecustomize.py"))
    torch.set_num_threads(1)
    main()
