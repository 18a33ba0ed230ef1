"""Stages on a GPU: do losses agree with one process on it, and how long is a step beside computing and transfers alone?

Needs a machine with a GPU and 4 CPU cores or more. Prints a table for each model.

    PYTHONPATH=. python jobs/experiments/gpu/steps.py losses|speed
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from plain import loop

from accept_mpi.job_file import parse
from accept_mpi.launch import mpirun
from accept_mpi.logs.format import KINDS
from accept_mpi.logs.reader import open_log
from accept_mpi.plan import Plan

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
OUT = Path("runs/experiments/gpu").resolve() / "-".join(sys.argv[1:2])
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
}  # fmt: skip
STEPS, SKIPPED, COMPARED = 30, 8, 10
MOBILENET = "mobilenetv2", "classes = 10, dropout = 0.0", "images"
GPT = "context = {}, layers = {}, width = {}, heads = {}, dropout = 0.0"
TWO_AND_TWO = "2 on the GPU, 2 on CPUs, 1f1b", "1f1b", "cuda cuda cpu cpu"
ONE, TWO = ("1 rank on the GPU", "1f1b", "cuda"), ("2 ranks on the GPU, 1f1b-async", "1f1b-async", "cuda cuda")
SYNCHRONOUS = "2 ranks on the GPU, 1f1b", "1f1b", "cuda cuda"
CASES = {
    "losses": {  # with as many layers on each device, to see that losses agree wherever layers are
        "MobileNetV2, 32 px, 32 samples": ((*MOBILENET, "size = 32", 32), [TWO_AND_TWO]),
        "GPT, 4 x 128, 16 x 64 tokens": (("gpt", GPT.format(64, 4, 128, 4), "tokens", "context = 64", 16), [TWO_AND_TWO]),
    },
    "speed": {
        "GPT, 8 x 512, 32 x 256 tokens": (
            ("gpt", GPT.format(256, 8, 512, 8), "tokens", "context = 256", 32), [TWO, SYNCHRONOUS, ONE],
        ),
        "MobileNetV2, 96 px, 128 samples": ((*MOBILENET, "size = 96", 128), [TWO, ONE]),
        "MobileNetV2, 32 px, 32 samples": ((*MOBILENET, "size = 32", 32), [TWO, SYNCHRONOUS, ONE]),
    },
}  # fmt: skip
PARTS = 8
JOB = """
[model]
name = "{model}"
args = {{ {model_args} }}
[data]
name = "random_data:{data}"
args = {{ {data_args} }}
[train]
batch_size = {batch}
micro_batches = {parts}
steps = {steps}
evaluate_every = 0
device = "cuda"
optimizer = {{ name = "sgd", lr = 0.01, momentum = 0.9 }}
[pipeline]
schedule = "{schedule}"
probe_seconds = 2
latency_db = "none"
[output]
directory = "{out}"
checkpoint_at_end = false
"""


class Run(NamedTuple):
    seconds: float
    """Median of a step."""
    losses: list[float]
    computing: dict[int, float]
    """Seconds of computing in a step, by rank."""
    transfers: float
    """Seconds of sending in a step on the busiest link and direction."""
    layers: str


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores, {PARTS} micro-batches a step")
    part = sys.argv[1]
    for name, (case, runs) in CASES[part].items():
        steps = COMPARED if part == "losses" else STEPS
        print(f"\n{name} a micro-batch")
        alone = plain(case)
        print(f"  one process, a plain loop             {1e3 * alone.seconds:7.1f} ms a step")
        for what, schedule, devices in runs:
            text = job_text(case, schedule, steps)
            if part == "losses":
                text = text.replace("[pipeline]", '[pipeline]\ncuts = "even"')
            show(what, ours(text, devices.split(), steps), alone)


def show(what: str, run: Run, alone: Run) -> None:
    differ = max(abs(a / b - 1) for a, b in zip(run.losses[:COMPARED], alone.losses[:COMPARED], strict=True))
    limit = max([*run.computing.values(), run.transfers])
    each = ", ".join(f"{1e3 * seconds:.1f}" for seconds in run.computing.values())
    print(
        f"  {what:36s}  {1e3 * run.seconds:7.1f} ms a step, {alone.seconds / run.seconds:4.2f} x a plain loop's speed; "
        f"computing {each} ms, sending {1e3 * run.transfers:.1f}; step / their maximum {run.seconds / limit:.2f}; "
        f"losses differ by {differ:.1e}; layers {run.layers}",
        flush=True,
    )


def job_text(case: tuple[Any, ...], schedule: str, steps: int) -> str:
    model, model_args, data_name, data_args, size = case
    return JOB.format(
        model=model, model_args=model_args, data=data_name, data_args=data_args, batch=size * PARTS, parts=PARTS,
        steps=steps, schedule=schedule, out=OUT / "run",
    )  # fmt: skip


def ours(text: str, devices: list[str], steps: int) -> Run:
    """Train a job under mpirun, with a device for each rank."""
    path = OUT / "job.toml"
    path.write_text(text)
    command = [mpirun.path(), "--bind-to", "none"]
    for device in devices:
        command += [*(":" if "-n" in command else ""), "-n", "1", "env", f"ACCEPT_MPI_DEVICE={device}"]
        command += [sys.executable, "-m", "accept_mpi", "train", str(path), "--quiet"]
    more = {"PYTHONPATH": f"{ROOT}:{HERE}", "OMP_NUM_THREADS": "2", **AS_ROOT}
    done = subprocess.run(command, env=os.environ | more, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}")
    with open_log(OUT / "run" / "log.h5") as log:
        rows, trace, plan = log["steps"][:], log["trace"][:], Plan.from_json(log.attrs["plan"])
    skipped = min(SKIPPED, steps - 5)
    count = steps - skipped
    late = trace[trace["step"] > skipped]
    took = late["end"] - late["start"]
    kinds = {kind: late["kind"] == KINDS.index(kind) for kind in KINDS}
    acts = kinds["F"] | kinds["B"] | kinds["W"] | kinds["U"]
    computing = {int(r): float(took[acts & (late["rank"] == r)].sum()) / count for r in np.unique(late["rank"][acts])}
    ways = [took[kinds["send"] & (late["boundary"] == b) & (late["direction"] == d)].sum() / count
            for b in range(len(plan.stages) - 1) for d in (0, 1)]  # fmt: skip
    return Run(
        statistics.median(np.diff(rows["end"][skipped:])), rows["loss"].tolist(), computing, float(max(ways, default=0.0)),
        ", ".join(f"{stage.start}-{stage.stop - 1}" for stage in plan.stages),
    )  # fmt: skip


def plain(case: tuple[Any, ...]) -> Run:
    """A loop in a process of its own, so that it leaves nothing on the GPU."""
    (OUT / "plain.toml").write_text(job_text(case, "1f1b", STEPS))
    command = [sys.executable, __file__, "--plain", str(OUT / "plain.toml")]
    more = {"PYTHONPATH": f"{ROOT}:{HERE}"}
    said = subprocess.run(command, env=os.environ | more, check=True, capture_output=True, text=True).stdout
    seconds, losses = json.loads(said)
    return Run(seconds, losses, {}, 0.0, "")


def measured(path: str) -> tuple[float, list[float]]:
    """Median step of a plain loop on the GPU, and its losses."""
    # Single precision, as the job says; and the same sums each time, without which losses differ by more than 1e-4.
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    took, losses = loop(parse(Path(path).read_text(), path), STEPS, "cuda")
    return statistics.median(took[SKIPPED:]), losses


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plain"]:
        print(json.dumps(measured(sys.argv[2])))
    else:
        main()
