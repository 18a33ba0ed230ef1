"""What a job changes of its model: weights from a file, what is frozen, adapters. (tests/mpi/test_fine_tuning.py trains.)"""

from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_nets import Language
from safetensors.torch import save_file
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.models import Chain, chain_of, check_changes, undivided
from accept_mpi.models.fine_tuning import merged
from accept_mpi.seeds import seeded

JOB = """
[data]
name = "digits"
[train]
batch_size = 8
micro_batches = 2
steps = 2
[output]
directory = "run"
"""
TOKENS = torch.zeros(2, 6, dtype=torch.int64)
LORA = 'train.lora={ targets = ["*.qkv"], rank = 2 }'


class Within(nn.Module):
    """A layer in which two names stand for one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x))


def language() -> nn.Module:
    return Language()


def within() -> nn.Module:
    return nn.Sequential(Within(), nn.Linear(5, 5))


def factories() -> list[Any]:
    """Layers that are made one by one, and share what the function has made."""
    words = nn.Embedding(5, 4)

    def head() -> nn.Module:
        made = nn.Linear(4, 5, bias=False)
        made.weight = nn.Parameter(words.weight.data)
        return made

    return [lambda: words, lambda: nn.Linear(4, 4), head]


def turned() -> nn.Module:
    """Square and oblong, of both orientations."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    return nn.Sequential(conv1d(6, 6), conv1d(8, 6), nn.Linear(8, 8), nn.Linear(8, 5))


def flat() -> nn.Module:
    """Two layers whose weights are parts of one memory, but no part of one is in the other."""
    memory, net = torch.randn(2, 6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer, part in zip(net, memory, strict=True):
        layer.weight = nn.Parameter(part)
    return net


def job_of(name: str, *overrides: str) -> Job:
    return parse(JOB, "job", [f"model.name=test_changes:{name}", *overrides])


def changed(name: str, *overrides: str, value: Any = TOKENS) -> tuple[Chain, str]:
    """The chain of a job with these changes, and what the log says of them."""
    job = job_of(name, *overrides)
    chain = chain_of(job, lambda: value)
    return chain, check_changes(chain, job)


def state(chain: Chain, start: int = 0, stop: int | None = None) -> dict[str, torch.Tensor]:
    stop = len(chain) if stop is None else stop
    layers = chain.build_range(start, stop, 0)
    return {
        chain.name_of(n, key): value for n, layer in enumerate(layers, start) for key, value in layer.state_dict().items()
    }


@pytest.mark.parametrize("left_out", ["head.weight", "words.weight"])
@pytest.mark.parametrize("change", [LORA, 'train.freeze=["words.*", "head.*"]', "train.ema=0.5"])
def test_tied_weights_need_one_name_in_the_file(tmp_path: Path, left_out: str, change: str) -> None:
    """Whether they are trained or not, and however the model is cut."""
    given = {name: value for name, value in Language().state_dict().items() if name != left_out}
    save_file(given, tmp_path / "w.safetensors")
    chain, said = changed("language", f"model.weights={tmp_path}/w.safetensors", change)
    assert f"{len(given) + 1} tensors loaded" in said
    assert "left" not in said
    known = next(given[name] for name in ("words.weight", "head.weight") if name in given)
    for at in range(len(chain)):
        for name, value in state(chain, at, at + 1).items():
            if name in ("words.weight", "head.weight"):
                assert torch.equal(value, known)
            elif "lora" not in name:
                assert torch.equal(value, given[name])


def test_names_within_a_layer_and_in_layers_made_apart(tmp_path: Path) -> None:
    for name, names in (("within", ["0.words.weight", "0.head.weight"]), ("factories", ["0.weight", "2.weight"])):
        chain, _ = changed(name)
        assert chain.aliases() == [names]
        given = {key: value + 1 for key, value in state(chain).items() if key != names[0]}
        save_file(given, tmp_path / "w.safetensors")
        chain, said = changed(name, f"model.weights={tmp_path}/w.safetensors", 'train.freeze=["0.*"]')
        assert "left" not in said
        assert torch.equal(state(chain)[names[0]], given[names[1]])


def test_a_file_with_two_values_for_one_tensor(tmp_path: Path) -> None:
    """All stages begin with the one that torch takes, the last."""
    with seeded(3):
        given = Language(tied=False).state_dict()
    save_file(given, tmp_path / "w.safetensors")
    chain, _ = changed("language", f"model.weights={tmp_path}/w.safetensors")
    net = Language()
    net.load_state_dict(given)
    for at in range(len(chain)):
        for name, value in state(chain, at, at + 1).items():
            assert torch.equal(value, net.state_dict()[name])


def test_weights_of_a_run_with_adapters(tmp_path: Path) -> None:
    """Another run with the same adapters begins with them; others are strange."""
    chain, _ = changed("language", LORA)
    given = {name: torch.randn_like(value) for name, value in state(chain).items() if name != "head.weight"}
    save_file(given, tmp_path / "w.safetensors")
    file = f"model.weights={tmp_path}/w.safetensors"
    chain, said = changed("language", LORA, file)
    assert "left" not in said
    found = state(chain)
    assert all(torch.equal(found[name], value) for name, value in given.items())
    with pytest.raises(UserError, match=r"blocks.0.qkv.lora_. is \(2, 16\) in it and \(3, 16\) in the model"):
        changed("language", LORA.replace("2", "3"), file)
    with pytest.raises(UserError, match=r"it has blocks.*lora_.*, which the model has not"):
        changed("language", file)


@pytest.mark.parametrize("name", ["turned", "flat"])
def test_what_adapters_add_is_in_merged_weights(name: str) -> None:
    """However a module's weight lies: its shape does not say that if it is square."""
    job = job_of(name, 'train.lora={ targets = ["*"], rank = 3, alpha = 6.0 }')
    adapted, plain = undivided(job), undivided(job_of(name))
    for key, parameter in adapted.named_parameters():
        if key.endswith("lora_b"):
            nn.init.normal_(parameter)
    plain.load_state_dict(merged(adapted.state_dict(), undivided(job)), strict=True)
    given = torch.randn(7, 6)
    assert torch.allclose(plain(given), adapted(given), atol=1e-5)


def test_an_adapter_on_one_use_of_a_tied_weight_is_not_merged() -> None:
    for name, weight, other in (("language", "head.weight", "words.weight"), ("within", "0.head.weight", "0.words.weight")):
        net = undivided(job_of(name, 'train.lora={ targets = ["*head"] }'))
        with pytest.raises(UserError, match=f"--merge: {weight} is {other}, too"):
            merged(net.state_dict(), net)
