"""What freezing gives: a GPT-2 whose first three quarters are frozen against the same one unfrozen, here and in a plain
PyTorch loop, in turns; and how the planner cuts both for two ranks.

    PYTHONPATH=. python jobs/experiments/unmodified/frozen.py
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from accept_mpi.job_file import parse
from accept_mpi.launch import mpirun
from accept_mpi.logs.reader import open_log
from accept_mpi.models import Whole, model_of
from accept_mpi.plan import Plan

ROOT = Path(__file__).resolve().parents[3]
OUT = Path("runs/experiments/frozen").resolve()
FROZEN = 'train.freeze=["transformer.w*", "transformer.h.[0-5].*", "lm_head.*"]'
TURNS, STEPS, SKIPPED = 5, 12, 3
JOB = f"""
data.name = "models:long_tokens"
output = {{ directory = "{OUT}/run", checkpoint_at_end = false }}
[model]
name = "transformers:GPT2LMHeadModel"
args = {{ vocab_size = 100, n_embd = 192, n_layer = 8, n_head = 4, bos_token_id = 1, eos_token_id = 2, use_cache = false }}
[train]
batch_size = 16
micro_batches = 4
steps = {STEPS}
evaluate_every = 0
[pipeline]
lanes = "off"
latency_db = "none"
probe_seconds = 2
"""


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "job.toml"
    path.write_text(JOB)
    ours: dict[bool, list[float]] = {False: [], True: []}
    plain: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(TURNS):
        for frozen in (False, True):
            ours[frozen].append(train(path, frozen, 1))
            plain[frozen].append(loop(path, frozen))
    ratios = [
        [slow / fast for slow, fast in zip(some[False], some[True], strict=True)] for some in (ours, plain)
    ]  # fmt: skip
    mine, theirs = map(statistics.median, ratios)
    print(f"a step is {mine:.2f} x shorter with the first six of eight blocks frozen, in a plain loop {theirs:.2f} x")
    print(f"that is {mine / theirs:.2f} of it (turns {', '.join(f'{a / b:.2f}' for a, b in zip(*ratios, strict=True))})")
    for frozen in (False, True):
        train(path, frozen, 2)
        with open_log(OUT / "run" / "log.h5") as log:
            plan = Plan.from_json(log.attrs["plan"])
        print(f"{'frozen' if frozen else 'all trained'}: two ranks hold {[(s.start, s.stop - 1) for s in plan.stages]}")


def train(path: Path, frozen: bool, ranks: int) -> float:
    """Median seconds of a step."""
    command = [mpirun.path(), "-n", str(ranks), sys.executable, "-m", "accept_mpi", "train"]
    more = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    settings = ["--set", FROZEN] if frozen else []
    subprocess.run([*command, str(path), *settings, "--quiet"], env=os.environ | more, check=True, capture_output=True)
    with open_log(OUT / "run" / "log.h5") as log:
        ends = log["steps"]["end"][SKIPPED:]
    return statistics.median(ends[1:] - ends[:-1])


def loop(path: Path, frozen: bool) -> float:
    """Median seconds of a step of a plain loop."""
    job = parse(path.read_text(), str(path), [FROZEN] if frozen else [])
    found = model_of(job)
    assert isinstance(found, Whole)
    model = found.make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    ids, took = torch.randint(100, (16, 64)), []
    for _ in range(STEPS):
        began = time.monotonic()
        for part in ids.split(4):
            logits = model(input_ids=part).logits
            (nn.functional.cross_entropy(logits.flatten(0, 1), part.flatten()) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.monotonic() - began)
    return statistics.median(took[SKIPPED:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    main()
