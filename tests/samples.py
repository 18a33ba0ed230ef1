"""Small jobs for tests, and the plain PyTorch process that each must equal (ARCHITECTURE, invariants)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from accept_mpi import data, models
from accept_mpi.seeds import ORDER, forward_seed, mix

CNN: dict[str, Any] = {
    "model": 'name = "cnn"\nargs = { width = 8, dropout = 0.2 }',
    "data": 'name = "digits"\nargs = { size = 8 }',
    "train": {"batch_size": 24, "micro_batches": 5, "steps": 6, "seed": 3},
}
GPT: dict[str, Any] = {
    "model": 'name = "gpt"\nargs = { context = 16, layers = 2, width = 32, heads = 2, dropout = 0.1 }',
    "data": 'name = "text"\nargs = { context = 16, limit = 20000 }',
    "train": {"batch_size": 8, "micro_batches": 4, "steps": 5, "seed": 1},
}
OPTIMIZER = 'optimizer = { name = "sgd", lr = 0.05, momentum = 0.9, weight_decay = 5e-4 }'


def write_job(path: Path, job: dict[str, Any], directory: str = "run", **keys: Any) -> Path:
    """A job file from one of the jobs above; ``keys`` are more lines, "pipeline_schedule" for ``pipeline.schedule``."""
    sections: dict[str, list[str]] = {
        "model": [job["model"]],
        "data": [job["data"]],
        "train": [OPTIMIZER],
        "pipeline": [] if "pipeline_cuts" in keys else ['cuts = "even"'],
        "recovery": [],
        "output": [f'directory = "{directory}"'],
    }
    train = job["train"] | {k.removeprefix("train_"): v for k, v in keys.items() if k.startswith("train_")}
    sections["train"] += [f"{key} = {_toml(value)}" for key, value in train.items()]
    for key, value in keys.items():
        section, _, name = key.partition("_")
        if section != "train":
            sections[section].append(f"{name} = {_toml(value)}")
    path.write_text("\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items()) + "\n")
    return path


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


class Plain:
    """One plain PyTorch process that accumulates the same micro-batches in the same order."""

    def __init__(self, model: str, model_args: dict[str, Any], data_name: str, data_args: dict[str, Any], seed: int):
        self.chain = models.load(model, model_args, seed)
        self.model = self.chain.whole(seed)
        if any(isinstance(m, nn.Conv2d) for m in self.model.modules()):
            self.model.to(memory_format=torch.channels_last)
        self.train_set, self.test_set = data.load(data_name, data_args)
        self.seed = seed

    def micro_batches(self, step: int, batch_size: int, count: int) -> list[np.ndarray]:
        n = len(self.train_set)
        per_epoch = -(-n // batch_size)
        order = np.random.Generator(np.random.Philox(mix(ORDER, self.seed, step // per_epoch))).permutation(n)
        batch = order[step % per_epoch * batch_size :][:batch_size]
        size = -(-batch_size // count)
        return [batch[i : i + size] for i in range(0, len(batch), size)]

    def forward(self, step: int, k: int, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        for index, layer in enumerate(self.model):
            torch.manual_seed(forward_seed(self.seed, step, k, index))
            x = layer(x)
        return x

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))

    def train(self, steps: int, batch_size: int, count: int) -> dict[str, torch.Tensor]:
        """Plain training; returns the state_dict at the end."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        for step in range(steps):
            micro = self.micro_batches(step, batch_size, count)
            total = sum(map(len, micro))
            for k, indices in enumerate(micro):
                output = self.forward(step, k, self.train_set.inputs(indices))
                loss = self.loss(output, self.train_set.targets(indices))
                (loss * (len(indices) / total)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return self.model.state_dict()


def plain(job: dict[str, Any]) -> Plain:
    """The plain process for one of the jobs above."""
    import tomllib

    model, data_part = tomllib.loads(job["model"]), tomllib.loads(job["data"])
    return Plain(model["name"], model["args"], data_part["name"], data_part["args"], job["train"]["seed"])


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Bit for bit, names included."""
    assert set(ours) == set(theirs)
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(ours)} tensors differ: {different[:5]}"
