"""Agreement on shapes."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from accept_mpi import models
from accept_mpi.codecs.tensors import BoundarySpecs, TensorSpec
from accept_mpi.comm.messages import Control, Gather
from accept_mpi.data import ArrayDataset, Dataset
from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.models.base import Chain
from accept_mpi.models.layers import Layers, build_layers
from accept_mpi.models.losses import find_loss
from accept_mpi.pipeline.stage import Stage
from accept_mpi.plan import Place
from accept_mpi.profiling.outline import Outline, outline_of
from accept_mpi.training.boundaries import agree_on_shapes

cross_entropy = find_loss("cross_entropy")

SECONDS = 600.0


def job_of(schedule: str = "1f1b") -> Job:
    text = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\n[output]\ndirectory="r"\n'
    return parse(text, "job", [f"pipeline.schedule={schedule}"])


class Messages:
    """What ranks in threads of one process send each other."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.mail: dict[tuple[int, int, str], queue.SimpleQueue[Any]] = {}
        self.lock = threading.Lock()
        self.sent = 0

    def box(self, source: int, dest: int, kind: str) -> "queue.SimpleQueue[Any]":
        with self.lock:
            return self.mail.setdefault((source, dest, kind), queue.SimpleQueue())


class Messenger:
    """One rank's."""

    def __init__(self, messages: Messages, rank: int) -> None:
        self.messages, self.rank = messages, rank

    def send(self, dest: int, control: Control) -> None:
        self.messages.sent += 1
        self._put(dest, control)

    def _put(self, dest: int, control: Control) -> None:
        self.messages.box(self.rank, dest, type(control).__name__).put(msgspec.msgpack.encode(control))

    def expect(self, kind: type[Control], sources: set[int], deadline: float, awaited: str) -> dict[int, Any]:
        boxes = {source: self.messages.box(source, self.rank, kind.__name__) for source in sources}
        return {source: msgspec.msgpack.decode(box.get(timeout=SECONDS), type=kind) for source, box in boxes.items()}

    def allgather(self, value: Any, deadline: float, awaited: str) -> list[Any]:
        ranks = range(self.messages.ranks)
        for rank in ranks:
            self._put(rank, Gather(value))
        return [self.expect(Gather, {rank}, deadline, awaited)[rank].value for rank in ranks]

    def flush(self, deadline: float, awaited: str) -> None:
        pass


Agreed = tuple[list[tuple[BoundarySpecs, BoundarySpecs]], int, list[Stage]]


Outlines = Callable[[int], Outline | None]


def agreed(chain: Chain, job: Job, data: Dataset, cuts: list[int], outlines: Outlines) -> Agreed:
    """What stages in threads agree on, in how many messages; the last rank is idle."""
    edges = [0, *cuts, len(chain)]
    stages, found, ranks = [], {}, len(edges)
    messages = Messages(ranks)
    conv = any(isinstance(part, nn.Conv2d) for index in range(len(chain)) for part in chain.build(index, 0).modules())
    for s in range(ranks - 1):
        layers = build_layers(chain, edges[s], edges[s + 1], 0)
        stages.append(Stage(layers, job, cross_entropy if s == ranks - 2 else None, conv))

    def rank(r: int) -> None:
        last = r == ranks - 2
        place = Place(r, ranks - 1, (r - 1,) if r else (), () if last else (r + 1,))
        if r == ranks - 1:
            place = Place(-1, ranks - 1)
        train = data if r == 0 or last else None
        stage = stages[min(r, ranks - 2)]
        messenger: Any = Messenger(messages, r)
        found[r] = agree_on_shapes(messenger, stage, place, ([4, 2], [4, 3, 1]), (train, train), SECONDS, outlines(r))

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return [found[r] for r in range(ranks)], messages.sent, stages


def of_zoo(name: str) -> tuple[Chain, Dataset]:
    if name == "gpt":
        chain = models.load(name, {"layers": 2, "width": 32, "heads": 2, "context": 16}, 0)
        tokens = torch.arange(5 * 16).reshape(5, 16) % 11
        return chain, ArrayDataset(tokens, tokens)
    chain = models.load(name, {"width": 0.25} if name == "mobilenetv2" else {}, 0)
    return chain, ArrayDataset(torch.randn(5, 3, 32, 32), torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async", "zero-bubble"])
@pytest.mark.parametrize("name", ["mobilenetv2", "resnet18", "gpt"])
def test_all_at_once_agrees_on_what_one_after_the_other_does(name: str, schedule: str) -> None:
    (chain, data), job = of_zoo(name), job_of(schedule)
    cuts = [len(chain) // 3, 2 * len(chain) // 3]
    inputs = data.inputs(np.arange(4))
    drawn = outline_of(chain, job, (inputs,))  # type: ignore[arg-type]
    slow, messages, before = agreed(chain, job, data, cuts, lambda rank: None)
    quick, none, after = agreed(chain, job, data, cuts, lambda rank: drawn)
    assert (messages > 0, none) == (True, 0)
    for one, two in zip(slow, quick, strict=True):
        for mine, others in zip(one, two, strict=True):
            assert (mine.forward, mine.backward) == (others.forward, others.backward)
    for one, two in zip(before, after, strict=True):
        assert not two.in_flight
        for (name, mine), (_, others) in zip(one.weights().items(), two.weights().items(), strict=True):
            assert torch.equal(mine, others), name
    # Another model's outline, or that of some ranks only, does not fit: one after the other, then.
    wrong = (TensorSpec((4, 7), (7, 1), "float32", grad=True),)
    strange = msgspec.structs.replace(drawn, layers=tuple(msgspec.structs.replace(x, inputs=wrong) for x in drawn.layers))
    for outlines in (lambda rank: strange, lambda rank: drawn if rank else None):
        third, messages, stages = agreed(chain, job, data, cuts, outlines)
        assert messages > 0
        for one, two in zip(slow, third, strict=True):
            assert [(x.forward, x.backward) for x in one] == [(x.forward, x.backward) for x in two]
        for one, two in zip(before, stages, strict=True):
            assert all(map(torch.equal, one.weights().values(), two.weights().values()))
            assert all(layer.training for layer in two.layers)


def test_a_last_test_sample_alone_does_not_stop_a_run_with_batch_norm() -> None:
    """BatchNorm1d refuses to train on one sample, but evaluates it: a size that only evaluation has is not trained on."""
    layers = Layers(0, ["a", "b"], [nn.Linear(3, 2), nn.BatchNorm1d(2)])
    stage = Stage(layers, job_of(), cross_entropy, False)
    data = ArrayDataset(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64))
    messenger: Any = Messenger(Messages(1), 0)
    agree_on_shapes(messenger, stage, Place(0, 1), ([4], [4, 1]), (data, data), 1.0)
    assert stage.layers[1].training
    assert int(stage.layers[1].num_batches_tracked) == 0
