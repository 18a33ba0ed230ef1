"""The keys of fine-tuning, each against a plain PyTorch loop written with torch's own means, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_nets import Language, Pictured, Sentences, classified
from safetensors.torch import load_file, save_file
from test_recorded import write
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.seeds import AUGMENT, ORDER, mix, seeded

STEPS, BATCH, MICRO, LR = 7, 8, 2, 0.1
LANGUAGE: dict[str, Any] = {"model": "language", "data": "sentences"}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def model() -> Language:
    with seeded(0):
        return Language()


def optimizer_of(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=LR, momentum=0.9, weight_decay=0.01)


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss = nn.functional.cross_entropy,
    before: Callable[[], Any] = lambda: None,
    after: Callable[[], Any] = lambda: None,
    forward: Callable[..., torch.Tensor] | None = None,
    weigh: Callable[[torch.Tensor], float] = lambda target: float(target.numel()),
) -> dict[str, torch.Tensor]:
    """A plain loop over the job's micro-batches."""
    data = Sentences(22)
    for step in range(STEPS):
        order = np.random.Generator(np.random.Philox(mix(ORDER, 0, step // 3))).permutation(22)
        batch = order[step % 3 * BATCH :][:BATCH]
        parts = [batch[begin : begin + MICRO] for begin in range(0, len(batch), MICRO)]
        whole = sum(weigh(data.ids[part].roll(-1, 1)) for part in parts)
        for part in parts:
            target = data.ids[part].roll(-1, 1)
            call = forward or (lambda ids, mask: net(ids, mask)["logits"])
            found = loss(call(data.ids[part], data.mask[part]).flatten(0, 1), target.flatten())
            (found * (weigh(target) / whole)).backward()
        before()
        optimizer.step()
        optimizer.zero_grad()
        after()
    return net.state_dict()


def ours(mpirun: Any, folder: Path, ranks: int, name: str = "ours", **keys: Any) -> dict[str, torch.Tensor]:
    """Weights after training with these keys of the job, "train__freeze" for ``train.freeze``."""
    path = write(folder, name, LANGUAGE)
    settings = [part for key, value in keys.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]
    mpirun(ranks, "-m", "accept_mpi", "train", path, *settings)
    return Checkpoint(folder / name).whole()


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(mine) == set(theirs)
    assert not [name for name, value in theirs.items() if not torch.equal(mine[name], value)]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["safetensors", "pt", "folder"])
def test_weights_from_a_file(mpirun, tmp_path: Path, ranks: int, kind: str) -> None:
    torch.manual_seed(5)
    given = Language().state_dict()
    path = tmp_path / {"safetensors": "w.safetensors", "pt": "w.pt", "folder": "w"}[kind]
    untied = {name: value for name, value in given.items() if name != "head.weight"}  # as transformers writes them
    if kind == "pt":
        torch.save(given, path)
    else:
        if kind == "folder":
            path.mkdir()
        save_file(untied, path / "model.safetensors" if kind == "folder" else path)
    net = model()
    net.load_state_dict(given)
    found = ours(mpirun, tmp_path, ranks, model__weights=path)
    same(found, train(net, optimizer_of(net.parameters())))


def test_weights_that_do_not_fit(mpirun, tmp_path: Path) -> None:
    given = {name: value for name, value in Language(words=20).state_dict().items() if not name.startswith("blocks.1")}
    given |= {"positions": torch.zeros(1, 9, 16), "more": torch.zeros(1)}
    del given["head.weight"]
    save_file(given, tmp_path / "w.safetensors")
    path = write(tmp_path, "ours", LANGUAGE)
    train_it = ["-m", "accept_mpi", "train", path, "--set", "model.weights=w.safetensors"]
    found = mpirun(2, *train_it, code=2)
    assert "it lacks blocks.1.norm.weight, blocks.1.norm.bias, blocks.1.qkv.weight and 3 more" in found.out
    assert "it has more, which the model has not; positions is (1, 9, 16) in it and (1, 12, 16) in the model" in found.out
    found = mpirun(2, *train_it, "--set", "model.strict=false")
    assert "left as they are" in found.out
    net = model()
    fitting = {name: value for name, value in given.items() if name not in ("positions", "more")}
    net.load_state_dict(fitting, strict=False)
    same(Checkpoint(tmp_path / "ours").whole(), train(net, optimizer_of(net.parameters())))
    found = mpirun(2, *train_it[:-1], "model.weights=none.safetensors", code=2)
    assert "there is no such file on this host" in found.out


def test_a_run_goes_on_without_the_file_that_it_began_with(mpirun, tmp_path: Path) -> None:
    given = {name: value for name, value in Language().state_dict().items() if name != "head.weight"}
    save_file(given, tmp_path / "w.safetensors")
    net = model()
    net.load_state_dict(given, strict=False)
    expected = train(net, optimizer_of(net.parameters()))
    ours(mpirun, tmp_path, 2, "part", model__weights="w.safetensors", train__steps=3)
    (tmp_path / "w.safetensors").unlink()
    command = ["-m", "accept_mpi", "train", tmp_path / "part.toml", "--set", "model.weights=w.safetensors"]
    said = mpirun(3, *command, "--resume", "part").out
    assert "model.weights is not read: a checkpoint has others" in said, said
    same(Checkpoint(tmp_path / "part").whole(), expected)
    assert "there is no such file" in mpirun(1, *command, code=2).out


@pytest.mark.parametrize("ranks", [1, 3])
def test_frozen_parts(mpirun, tmp_path: Path, ranks: int) -> None:
    net = model()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith(("words", "positions", "blocks.0")) or name == "blocks.0.out.bias")
    expected = train(net, optimizer_of([p for p in net.parameters() if p.requires_grad]))
    frozen = '["words.*", "head.*", "positions", "blocks.0.*"]'
    same(ours(mpirun, tmp_path, ranks, train__freeze=frozen, train__unfreeze='["blocks.0.out.bias"]'), expected)
    found = mpirun(1, "-m", "accept_mpi", "train", tmp_path / "ours.toml", "--set", 'train.freeze=["block.*"]', code=2)
    assert 'train.freeze: "block.*" matches nothing in the model' in found.out


@pytest.mark.parametrize("ranks", [1, 3])
def test_groups_of_parameters(mpirun, tmp_path: Path, ranks: int) -> None:
    net = model()
    named = dict(net.named_parameters())
    slow = [p for name, p in named.items() if name.startswith("words")]
    vectors = [p for name, p in named.items() if p.dim() < 2]
    rest = [p for p in named.values() if all(p is not one for one in (*slow, *vectors))]
    groups = [{"params": slow, "lr": 0.01, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}, {"params": rest}]
    expected = train(net, optimizer_of(groups))
    keys = {
        "train__groups": '[{ names = ["words.*"], lr = 0.01, weight_decay = 0.5 }]',
        "train__optimizer__decay_vectors": "false",
    }
    same(ours(mpirun, tmp_path, ranks, **keys), expected)  # the head is the words, on another rank


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_clipped_gradients(mpirun, tmp_path: Path, ranks: int) -> None:
    net, norms = model(), []
    expected = train(
        net, optimizer_of(net.parameters()),
        before=lambda: norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.4))),
    )  # fmt: skip
    assert min(norms) < 0.4 < max(norms) or max(norms) > 0.4
    same(ours(mpirun, tmp_path, ranks, train__clip_norm=0.4), expected)
    if ranks == 3:
        group = {"pipeline__cuts": "[5]", "pipeline__ranks": "[[0, 1], 2]"}
        same(ours(mpirun, tmp_path, 3, "group", train__clip_norm=0.4, **group), expected)


def test_clipped_without_waiting(mpirun, tmp_path: Path) -> None:
    """Asynchronously the factor is that of known steps: the same from run to run, and gradients are clipped."""
    keys = {"train__clip_norm": 0.05, "pipeline__schedule": "1f1b-async", "model__args": "{ tied = false }"}
    first, second = (ours(mpirun, tmp_path, 3, name, **keys) for name in ("one", "two"))
    same(first, second)
    free = ours(mpirun, tmp_path, 3, "free", **(keys | {"train__clip_norm": 1e6}))
    assert any(not torch.equal(first[name], value) for name, value in free.items())


@pytest.mark.parametrize("ranks", [1, 3])
def test_smoothing_and_weights_of_classes(mpirun, tmp_path: Path, ranks: int) -> None:
    weights = [0.5 + n / 10 for n in range(20)]
    net, table = model(), torch.tensor(weights)
    loss = nn.CrossEntropyLoss(weight=table, label_smoothing=0.1)
    expected = train(net, optimizer_of(net.parameters()), loss, weigh=lambda target: float(table[target].sum()))
    same(ours(mpirun, tmp_path, ranks, train__label_smoothing=0.1, train__class_weights=weights), expected)


@pytest.mark.parametrize("ranks", [1, 3])
def test_moving_average(mpirun, tmp_path: Path, ranks: int) -> None:
    net = model()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    expected = train(net, optimizer_of(net.parameters()), after=lambda: average.update_parameters(net))
    same(ours(mpirun, tmp_path, ranks, train__ema=0.7), expected)
    mpirun(1, "-m", "accept_mpi", "export", tmp_path / "ours", tmp_path / "out.safetensors", "--ema")
    same(load_file(tmp_path / "out.safetensors"), average.module.state_dict())
    test = Sentences(9)
    average.module.eval()
    with torch.no_grad():
        logits = average.module(test.ids, test.mask)["logits"]
    with open_log(tmp_path / "ours" / "log.h5") as log:
        loss = float(nn.functional.cross_entropy(logits.flatten(0, 1), test.ids.roll(-1, 1).flatten()))
        assert log["evals"]["loss"][-1] == pytest.approx(loss, rel=1e-5)


def test_average_after_resuming(mpirun, tmp_path: Path) -> None:
    whole = ours(mpirun, tmp_path, 2, "whole", train__ema=0.7)
    ours(mpirun, tmp_path, 1, "half", train__ema=0.7, train__steps=3)
    path = tmp_path / "whole.toml"
    keys = ["--set", "train.ema=0.7", "--set", "output.directory=rest"]
    mpirun(3, "-m", "accept_mpi", "train", path, *keys, "--resume", tmp_path / "half")
    same(Checkpoint(tmp_path / "rest").whole(), whole)
    for name in ("whole", "rest"):
        mpirun(1, "-m", "accept_mpi", "export", tmp_path / name, tmp_path / f"{name}.safetensors", "--ema")
    same(load_file(tmp_path / "whole.safetensors"), load_file(tmp_path / "rest.safetensors"))


@pytest.mark.parametrize("ranks", [1, 3])
def test_bf16(mpirun, tmp_path: Path, ranks: int) -> None:
    net = model()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.cross_entropy(output, target)

    def forward(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(ids, mask)["logits"]

    expected = train(net, optimizer_of(net.parameters()), loss, forward=forward)
    same(ours(mpirun, tmp_path, ranks, train__precision="bf16"), expected)


@pytest.mark.parametrize("ranks", [1, 3])
def test_adapters(mpirun, tmp_path: Path, ranks: int) -> None:
    """LoRA: adapters and what is named are trained, nothing else; merged, the plain model gives the same."""
    keys = {
        "train__lora": '{ targets = ["blocks.*.qkv", "blocks.*.out"], rank = 3, alpha = 6.0 }',
        "train__unfreeze": '["*.norm.*"]',
    }
    found = ours(mpirun, tmp_path, ranks, **keys)
    before, names = model().state_dict(), [name for name in found if "lora" in name]
    assert len(names) == 2 * 6
    changed = {name for name, value in before.items() if not torch.equal(found[name], value)}
    assert changed == {f"blocks.{n}.norm.{kind}" for n in range(3) for kind in ("weight", "bias")}

    begun = ours(mpirun, tmp_path, 1, "begin", **keys, train__steps=1, train__optimizer="{ lr = 1e-30 }")
    net = model()
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    trained = []
    for n, block in enumerate(net.blocks):
        trained += list(block["norm"].requires_grad_(True).parameters())
        for kind in ("qkv", "out"):
            layer = block[kind]
            a = nn.Parameter(begun[f"blocks.{n}.{kind}.lora_a"])
            b = nn.Parameter(torch.zeros(layer.out_features, 3))
            trained += [a, b]
            layer.register_parameter("lora_a", a)
            layer.register_parameter("lora_b", b)
            layer.forward = lambda x, layer=layer: (
                nn.functional.linear(x, layer.weight, layer.bias) + 2.0 * ((x @ layer.lora_a.T) @ layer.lora_b.T)
            )
    expected = train(net, optimizer_of(trained))
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items())
    mpirun(1, "-m", "accept_mpi", "export", tmp_path / "ours", tmp_path / "merged.safetensors", "--merge")
    merged = model()
    merged.load_state_dict(load_file(tmp_path / "merged.safetensors"), strict=True)
    data = Sentences(9)
    one, other = (one(data.ids, data.mask)["logits"] for one in (merged, net))
    assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("how", ["mixup", "cutmix"])
def test_mixed_samples(mpirun, tmp_path: Path, ranks: int, how: str) -> None:
    """The first stage mixes images and the last one their classes alike: as a plain loop with the same numbers does."""
    path = write(tmp_path, "ours", {"model": "pictured", "data": "classified", "cuts": '"even"'})
    keys = ["--set", f"train.mix={{ classes = 4, {how} = 0.8 }}", "--set", "train.evaluate_every=0"]
    mpirun(ranks, "-m", "accept_mpi", "train", path, *keys)
    with seeded(0):
        net = Pictured()
    x, y = (part for part in classified()[0].tensors)
    optimizer, drawn = optimizer_of(net.parameters()), []
    for step in range(STEPS):
        order = np.random.Generator(np.random.Philox(mix(ORDER, 0, step // 3))).permutation(22)
        batch = order[step % 3 * BATCH :][:BATCH]
        for begin in range(0, len(batch), MICRO):
            part = batch[begin : begin + MICRO]
            draw = np.random.Generator(np.random.Philox(mix(AUGMENT, mix(AUGMENT, 0, step // 3), *part.tolist())))
            share, middle = float(draw.beta(0.8, 0.8)), draw.random(2)
            given, target = x[part], nn.functional.one_hot(y[part], 4).float()
            if how == "mixup":
                given = given.roll(1, 0).mul_(1 - share).add_(given.mul(share))
            else:
                row, column, half = int(middle[0] * 16), int(middle[1] * 16), int(0.5 * (1 - share) ** 0.5 * 16)
                rows = slice(max(row - half, 0), min(row + half, 16))
                columns = slice(max(column - half, 0), min(column + half, 16))
                other, given = given.roll(1, 0), given.clone()
                given[:, :, rows, columns] = other[:, :, rows, columns]
                share = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / 256
            drawn.append(share)
            target = target.roll(1, 0).mul_(1 - share).add_(target.mul(share))
            loss = nn.functional.cross_entropy(net(given), target)
            (loss * (len(part) / len(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(set(drawn)) > 10
    same(Checkpoint(tmp_path / "ours").whole(), net.state_dict())


@pytest.mark.parametrize("ranks", [1, 3])
def test_metrics_of_classes_beside_mixed_samples(mpirun, tmp_path: Path, ranks: int) -> None:
    """Evaluations have classes: a metric of them was refused, since it was tried on what training mixes."""
    path = write(tmp_path, "ours", {"model": "pictured", "data": "classified", "cuts": '"even"'})
    keys = ["--set", "train.mix={ classes = 4, mixup = 0.8 }", "--set", "train.metrics=['top2']"]
    mpirun(ranks, "-m", "accept_mpi", "train", path, *keys, "--set", "output.keep_best=top2")
    with seeded(0):
        net = Pictured()
    net.load_state_dict(Checkpoint(tmp_path / "ours").whole())
    x, y = (part for part in classified()[1].tensors)
    with torch.no_grad():
        best = net.eval()(x).topk(2, dim=-1).indices
    with open_log(tmp_path / "ours") as log:
        assert log["metrics"]["value"][-1] == pytest.approx(float((best == y[:, None]).any(-1).float().mean()))


@pytest.mark.parametrize("head", [True, False])
def test_a_model_that_is_frozen_whole_is_told(trained, tmp_path: Path, head: bool) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        f'model = {{ name = "recorded_nets:frozen", args = {{ head = {str(head).lower()} }} }}\n'
        'data.name = "recorded_nets:few"\ntrain = { batch_size = 8, steps = 2 }\n'
        'pipeline = { cuts = [2], latency_db = "none" }\noutput.directory = "run"\n'
    )
    (done,) = trained(2, tmp_path, [path])
    assert ("model: no parameter is trained" in done.out) == (not head)


MERGING = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
class Merging(nn.Linear):  # as loralib's layers
    def __init__(self, n, m):
        super().__init__(n, m)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, n)), nn.Parameter(torch.randn(m, 2))
        self.merged = False
    def train(self, mode=True):
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.merged = not mode
        return super().train(mode)
    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + x @ self.down.t() @ self.up.t()
def model():
    return nn.Sequential(Merging(6, 6), nn.Tanh(), Merging(6, 3))
def data():
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1)), TensorDataset(x[:8], x[:8, :3].argmax(1))
"""


def test_what_evaluation_merges_it_takes_out_again(trained, tmp_path: Path) -> None:
    """The averages with which the model is evaluated, not the newest weights."""
    (tmp_path / "net.py").write_text(MERGING)
    path = tmp_path / "job.toml"
    path.write_text(
        'model.name = "net:model"\ndata.name = "net:data"\n'
        "train = { batch_size = 8, micro_batches = 2, steps = 9, lr = 0.1 }\n"
        'pipeline.cuts = [1]\noutput.directory = "plain"\n'
    )
    trained(2, tmp_path, [path, (path, "train.ema=0.9", "output.directory=average")])
    expected, found = (Checkpoint(tmp_path / name).whole() for name in ("plain", "average"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0.0)
