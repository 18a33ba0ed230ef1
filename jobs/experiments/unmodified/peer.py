"""What torch.distributed.pipelining makes of a model: ``python peer.py JOB.toml SPLIT SPLIT``. Three processes train one
step; the gradients are compared with the plain model's. Prints one line."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plain import forward, made
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

from accept_mpi.data import fetch
from accept_mpi.data import load as load_data
from accept_mpi.job_file import parse

_COUNT = 4


def rank(number: int, path: str, splits: list[str], folder: str, answers: Any) -> None:
    try:
        job = parse(Path(path).read_text(), path)
        model, (data, _) = made(job), load_data(job.data.name, job.data.args, job.model)
        samples = fetch(data, torch.arange(_COUNT).numpy(), 0, inputs=True, targets=True)
        x: dict[str, Any] = samples.inputs if isinstance(samples.inputs, dict) else {}
        args = () if x else (samples.inputs,)

        def loss_of(output: Any, target: Any) -> torch.Tensor:
            found = output[job.model.output or "logits"] if isinstance(output, dict) else output
            if job.model.output == "loss":
                return found
            if job.train.loss == "mse":
                return nn.functional.mse_loss(found, target)
            return nn.functional.cross_entropy(found.reshape(-1, found.shape[-1]), target.reshape(-1))

        expected: dict[str, torch.Tensor] = {}
        loss = loss_of({job.model.output or "logits": forward(model, samples.inputs, job.model.output)}, samples.targets)
        loss.backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=3)
        spec = dict.fromkeys(splits, SplitPoint.BEGINNING)
        pipe = pipeline(model, mb_args=args, mb_kwargs=x or None, split_spec=spec)
        if pipe.num_stages != 3:
            raise RuntimeError(f"{pipe.num_stages} stages instead of 3")
        stage = pipe.build_stage(number, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 1, loss_fn=loss_of)
        if number == 0:
            schedule.step(*args, **x)
        elif number == 2:
            schedule.step(target=samples.targets)
        else:
            schedule.step()
        wrong = [
            name for name, p in stage.submod.named_parameters()
            if name in expected and not (p.grad is not None and torch.allclose(p.grad, expected[name], rtol=1e-3, atol=1e-5))
        ]  # fmt: skip
        answers.put((number, f"trains, but gradients differ: {wrong[0]}" if wrong else ""))
    except BaseException as error:
        answers.put((number, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"))


def main(path: str, splits: list[str]) -> None:
    context = mp.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank, args=(n, path, splits, folder, answers)) for n in range(3)]
        for process in ranks:
            process.start()
        found: dict[int, str] = {}
        while len(found) < 3 and not any(found.values()):
            number, answer = answers.get(timeout=300)
            found[number] = answer
        for process in ranks:
            process.kill()
            process.join()
    why = next((answer for answer in found.values() if answer), "")
    print(f"ANSWER {why or 'yes'}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
