"""What a job changes of its model: weights from a file, what is frozen, adapters. (tests/mpi/test_fine_tuning.py trains.)"""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from probing import probe
from recorded_nets import Language
from safetensors.torch import save_file
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.models import Chain, chain_of, check_changes, undivided
from accept_mpi.models.fine_tuning import merged
from accept_mpi.models.layers import build_layers
from accept_mpi.models.losses import find_loss
from accept_mpi.pipeline.stage import Stage
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


@pytest.fixture(autouse=True)
def _torchs_fast_path() -> Iterator[None]:
    """On before each test, as in a new process: adapters leave it."""
    torch.backends.mha.set_fastpath_enabled(True)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


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


def cut_in_two() -> list[Any]:
    """Two layers with one weight, which are made in two calls."""
    first, last = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    last.weight = first.weight
    return [lambda: first, lambda: nn.Linear(4, 4), lambda: last]


def half_frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    return net


class Twice(nn.Module):
    """A module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Computed(nn.Module):
    def __init__(self, old: bool) -> None:
        super().__init__()
        norm = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
        self.linear = norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def trained(name: str, *overrides: str, value: Any = TOKENS) -> set[str]:
    """Names of the parameters that are trained, in a chain that is built one layer after the other."""
    chain, _ = changed(name, *overrides, value=value)
    layers = [layer for n in range(len(chain)) for layer in chain.build_range(n, n + 1, 0)]
    return {
        chain.name_of(n, key)
        for n, layer in enumerate(layers)
        for key, parameter in layer.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


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


@pytest.mark.parametrize("strict", ["true", "false"])
def test_a_file_of_which_nothing_fits(tmp_path: Path, strict: str) -> None:
    """A run would begin with random weights. Names differ by what is in front of them more often than not."""
    given = Within().state_dict()
    weights = [f"model.weights={tmp_path}/w.pt", f"model.strict={strict}"]
    for front in ("module.", "model.", "_orig_mod."):
        torch.save(
            {"state_dict": {f"{front}0.{name}": value for name, value in given.items()}, "epoch": 3}, tmp_path / "w.pt"
        )
        with pytest.raises(UserError, match=rf'it lacks 0\.words.*; its names have "{front}" in front, and .* have not'):
            changed("within", *weights)
    torch.save(given, tmp_path / "w.pt")
    with pytest.raises(UserError, match=r'which the model has not; the model\'s names have "0\." in front'):
        changed("within", *weights)
    torch.save({"net": {"inner": given}}, tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"it lacks 0\.words\.weight, 0\.head\.weight.*; nothing in it fits$"):
        changed("within", *weights)


@pytest.mark.parametrize("what", ["model", "settings", "script", "damaged"])
def test_a_file_that_holds_more_than_tensors(tmp_path: Path, what: str) -> None:
    path = tmp_path / "w.pt"
    torch.save({"model": Within(), "settings": {"state_dict": {}, "path": Path("x")}}.get(what), path)
    if what == "damaged":
        path.write_bytes(b"weights")
    if what == "script":
        torch.jit.script(nn.Linear(2, 2)).save(path)
    with pytest.raises(UserError, match=r"w\.pt cannot be read: .* holds more .*: save the model's state_dict"):
        changed("within", f"model.weights={path}")


@pytest.mark.parametrize(("kind", "said"), [("meta", "without values"), ("sparse", "sparse, nested or quantized")])
def test_a_file_of_tensors_that_are_not_plain(tmp_path: Path, kind: str, said: str) -> None:
    weight = torch.empty(5, 4, device="meta") if kind == "meta" else torch.zeros(5, 4).to_sparse()
    torch.save({"0.words.weight": weight, "1.weight": torch.ones(5, 5), "1.bias": torch.ones(5)}, tmp_path / "w.pt")
    with pytest.raises(UserError, match=rf"0\.words\.weight in .*w\.pt is a tensor {said}"):
        changed("within", f"model.weights={tmp_path}/w.pt")


class LoadsItself(nn.Linear):
    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({**state, f"{prefix}weight": state[f"{prefix}weight"].T}, prefix, *rest)


def loading(kind: str) -> nn.Sequential:
    inner: nn.Module = nn.Linear(4, 4)
    if kind == "function":
        inner = LoadsItself(4, 4)
    elif kind == "before":
        inner.register_load_state_dict_pre_hook(lambda module, state, *rest: None)
    elif kind == "after":
        inner.register_load_state_dict_post_hook(lambda module, keys: None)
    norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))  # torch's own hooks are about old names
    return nn.Sequential(
        nn.Embedding(5, 4), nn.Sequential(inner, nn.BatchNorm1d(4)), norm, nn.utils.spectral_norm(nn.Linear(4, 4))
    )


@pytest.mark.parametrize("kind", ["", "function", "before", "after"])
def test_code_for_loading_is_not_called_silently(tmp_path: Path, kind: str) -> None:
    torch.save(loading(kind).state_dict(), tmp_path / "w.pt")
    _, said = changed("loading", f"model.weights={tmp_path}/w.pt", f'model.args={{ kind = "{kind}" }}')
    assert ("1.0 has hooks or functions of its own for loading, which are not called" in said) == bool(kind)
    assert ("not called" in said) == bool(kind)


def normed() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(6)))


def test_norms_need_no_counters_in_the_file(tmp_path: Path) -> None:
    """As for ``load_state_dict``: old versions of torch did not save them."""
    state = {name: value for name, value in normed().state_dict().items() if not name.endswith("num_batches_tracked")}
    normed().load_state_dict(state)
    torch.save(state, tmp_path / "w.pt")
    _, said = changed("normed", f"model.weights={tmp_path}/w.pt")
    assert said.endswith(f"{len(state)} tensors loaded")
    del state["1.1.running_mean"]
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"it lacks 1\.1\.running_mean;"):
        changed("normed", f"model.weights={tmp_path}/w.pt")


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


@pytest.mark.parametrize("name", ["words", "head"])
@pytest.mark.parametrize("frozen", ['train.freeze=["*"]', LORA])
def test_a_tied_parameter_is_trained_if_one_of_its_names_is_to_be(name: str, frozen: str) -> None:
    found = trained("language", frozen, f'train.unfreeze=["{name}.weight"]')
    assert {one for one in found if "lora" not in one} == {"words.weight", "head.weight"}
    for model, first, last in (("within", "0.words", "0.head"), ("cut_in_two", "0", "2")):
        which = first if name == "words" else last
        unfrozen = f'train.unfreeze=["{which}.weight"]'
        whole = undivided(job_of(model, 'train.freeze=["*"]', unfrozen))
        found = {key for key, one in whole.named_parameters(remove_duplicate=False) if one.requires_grad}
        assert found == {f"{first}.weight", f"{last}.weight"}
        chain, _ = changed(model, 'train.freeze=["*"]', unfrozen)
        assert not any(one.constant for one in chain.shared())


@pytest.mark.parametrize("frozen", ['train.freeze=["*"]', 'train.freeze=["0.*", "1.*"]'])
def test_something_must_be_trained(frozen: str) -> None:
    with pytest.raises(UserError, match=r"train.freeze: no parameter of the model is left to train"):
        changed("within", frozen)


def test_what_the_model_has_frozen_may_be_trained() -> None:
    every = {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert trained("half_frozen") == every
    assert trained("half_frozen", 'train.unfreeze=["0.weight"]') == every | {"0.weight"}
    assert trained("half_frozen", 'train.freeze=["1.*"]', 'train.unfreeze=["0.*"]') == {"0.weight", "0.bias"} | every - {
        "1.weight",
        "1.bias",
    }
    with pytest.raises(UserError, match=r'train.unfreeze: "nothing.\*" matches nothing'):
        changed("half_frozen", 'train.unfreeze=["nothing.*"]')


def twice() -> nn.Module:
    return Twice()


def test_a_module_gets_its_adapter_under_any_of_its_names() -> None:
    for target in ("first", "second", "*s*"):
        assert trained("twice", f'train.lora={{ targets = ["{target}"] }}', value=torch.zeros(2, 4)) == {
            f"{name}.lora_{kind}" for name in ("first", "second") for kind in "ab"
        }


def computed(old: bool) -> nn.Module:
    return Computed(old)


@pytest.mark.parametrize("old", ["true", "false"])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_an_adapter_on_a_computed_weight(old: str) -> None:
    with pytest.raises(UserError, match=r"train.lora.targets: the weight of linear is computed from other parameters"):
        undivided(job_of("computed", f"model.args={{ old = {old} }}", 'train.lora={ targets = ["linear"] }'))


def test_adapters_within_torchs_own_layers_count_in_evaluation() -> None:
    net = undivided(job_of("encoder", 'train.lora={ targets = ["*.linear1"] }'))
    for key, parameter in net.named_parameters():
        if key.endswith("lora_b"):
            nn.init.normal_(parameter)
    given = torch.randn(3, 5, 8)
    with torch.no_grad():
        expected = net.train()(given)
        assert torch.allclose(net.eval()(given), expected, atol=1e-5)


class Attending(nn.Module):
    """Whose attention has a linear module that nobody calls, as another part of it, and of which one is used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.direct, self.never, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x.to(self.never.weight.dtype))
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.out(nn.functional.linear(x, self.direct.weight))


def attending() -> nn.Module:
    return Attending()


def tried(name: str, *overrides: str, value: Any) -> None:
    """Make the set-up's trial, of a stage of all layers."""
    chain, _ = changed(name, *overrides, value=value)
    stage = Stage(build_layers(chain, 0, len(chain), 0), job_of(name, *overrides), find_loss("mse"), False)
    inputs = stage.from_data(value)
    whole = chain.build_range(0, len(chain), 0)
    with torch.no_grad():
        target = torch.zeros_like(reduce(lambda given, layer: layer(given), whole, value))
    probe(stage, inputs.tensors, target, lambda outputs, of: (), inputs.tree, len(target))


def test_an_adapter_on_a_module_that_is_not_called() -> None:
    value = torch.randn(2, 3, 4)
    for target, name in (("attention.out*", "attention.out_proj"), ("direct", "direct")):
        with pytest.raises(UserError, match=f"computes with the weight of {name} without calling that module"):
            tried("attending", f'train.lora={{ targets = ["into", "{target}"] }}', value=value)
    tried("attending", 'train.lora={ targets = ["into", "never", "out"] }', value=value)
    tried("language", 'train.lora={ targets = ["head", "*.qkv"] }', "model.output=logits", value={"ids": TOKENS})
    tried("encoder", 'train.lora={ targets = ["0", "*.linear?"] }', value=torch.randn(2, 3, 8))
