"""The zoo: shapes, names, parameter counts; chains cut anywhere; users' own models."""

from pathlib import Path

import pytest
import torch
from torch import nn

from accept_mpi import models
from accept_mpi.errors import UserError
from accept_mpi.models import as_chain

IMAGE = {"cnn": 8, "mobilenetv2": 32, "resnet18": 32, "vgg11": 32}
SMALL = {"mobilenetv2": {"width": 0.25}, "gpt": {"layers": 2, "width": 32, "heads": 4, "context": 16}}


def sample(name: str, n: int = 2) -> torch.Tensor:
    return torch.randint(0, 128, (n, 16)) if name == "gpt" else torch.randn(n, 3, IMAGE[name], IMAGE[name])


@pytest.mark.parametrize("name", models.ZOO)
def test_shapes_and_gradients(name: str) -> None:
    whole = models.load(name, SMALL.get(name, {}), 0).whole()
    out = whole(sample(name))
    assert out.shape == ((2, 16, 128) if name == "gpt" else (2, 10))
    out.square().mean().backward()
    assert all(p.grad is not None for p in whole.parameters())


@pytest.mark.parametrize("name", models.ZOO)
def test_layers_alone_are_the_layers_of_the_whole(name: str) -> None:
    chain = models.load(name, SMALL.get(name, {}), 0)
    whole = chain.whole(seed=4).state_dict()
    alone = {
        f"{chain.names[i]}.{key}": value
        for i in reversed(range(len(chain)))
        for key, value in chain.build(i, 4).state_dict().items()
    }
    assert set(alone) == set(whole)
    assert all(torch.equal(alone[key], whole[key]) for key in whole)
    if name != "gpt":
        other = chain.whole(seed=5).state_dict()
        assert any(not torch.equal(other[key], whole[key]) for key in whole)


@pytest.mark.parametrize(
    ("name", "args", "parameters"),
    [
        ("resnet18", {}, 11_173_962),
        # The paper's 3,504,872 with 1,000 classes: strides do not change the count.
        ("mobilenetv2", {"classes": 1000}, 3_504_872),
        ("vgg11", {}, 9_228_362),
        ("gpt", {"layers": 2, "width": 64, "heads": 4, "context": 32}, 118_656),
    ],
)
def test_parameter_counts(name: str, args: dict, parameters: int) -> None:
    assert sum(p.numel() for p in models.load(name, args, 0).whole().parameters()) == parameters


def test_mobilenet_is_cut_inside_its_blocks() -> None:
    names = models.load("mobilenetv2", {}, 0).names
    assert len(names) == 53
    assert names[:6] == [
        "stem",
        "block01_depthwise",
        "block01_project",
        "block02_expand",
        "block02_depthwise",
        "block02_project",
    ]
    layers = models.load("mobilenetv2", {"width": 0.25}, 0)
    x = torch.randn(2, 8, 8, 8)
    branch = layers.build(names.index("block03_expand"), 0)
    h, along = branch(x)
    assert along is x
    assert h.shape[1] == 8 * 6


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("mobilenet", {}, 'did you mean "mobilenetv2"?'),
        ("cnn", {"classes": 0}, "classes must be at least 1, got 0"),
        ("cnn", {"dropout": 1.5}, r"dropout must lie in \[0, 1\), got 1.5"),
        ("gpt", {"width": 30, "heads": 4}, "width must be a multiple of heads"),
        ("cnn", {"clases": 3}, "unexpected keyword argument 'clases'"),
        ("no_such_module:f", {}, 'cannot import "no_such_module"'),
        ("json:dump_", {}, 'has no function "dump_"; did you mean "dump'),
        ("json:dumps", {"obj": 1}, "expected an nn.Module or a list of layers, got str"),
    ],
)
def test_mistakes(name: str, args: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        models.load(name, args, 0)


def test_users_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_net.py").write_text(
        "from torch import nn\n"
        "def sequential(): return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))\n"
        "def layers(): return [nn.Linear(2, 3), nn.Linear(3, 1)]\n"
        "def factories(): return [lambda: nn.Linear(2, 3), ('last', lambda: nn.Linear(3, 1))]\n"
        "made = sequential()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert models.load("my_net:sequential", {}, 0).names == ["0", "1", "2"]
    same = [models.load("my_net:sequential", {}, 7).whole().state_dict() for _ in range(2)]
    assert all(torch.equal(same[0][key], same[1][key]) for key in same[0])
    assert len(models.load("my_net:layers", {}, 0)) == 2
    assert models.load("my_net:factories", {}, 0).names == ["0", "last"]
    with pytest.raises(UserError, match=r'^model.name: "my_net:made" is a model already: name the function'):
        models.load("my_net:made", {}, 0)


def test_a_layer_that_comes_twice_stays() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 3), relu, nn.Linear(3, 3), relu, nn.Linear(3, 1))
    x = torch.randn(5, 2)
    assert torch.equal(as_chain(model).whole()(x), model(x))


@pytest.mark.parametrize("mixed", [False, True])
def test_layers_are_built_as_they_were(mixed: bool) -> None:
    """Whatever is done to a built one, the next one is new: after a loss a run may begin anew from its layers."""
    linear = nn.Linear(2, 3)
    chain = as_chain([linear, nn.ReLU] if mixed else [linear, nn.ReLU()])
    first = chain.build(0, 0)
    with torch.no_grad():
        first.weight.zero_()
    assert torch.equal(chain.build(0, 0).weight, linear.weight)
    assert linear.weight.abs().min() > 0


class _Branches(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x) + self[1](x)


def test_as_chain_refuses() -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="_Branches has a forward, hooks or state of its own"):
        as_chain(_Branches(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(TypeError, match='layer "1" is a int'):
        as_chain([linear, 3])
    with pytest.raises(ValueError, match="at least one layer"):
        as_chain([])
    with pytest.raises(ValueError, match="come twice: a"):
        as_chain([("a", nn.ReLU()), ("a", nn.ReLU())])
    with pytest.raises(ValueError, match=r'"a.b".*must not contain'):
        as_chain([("a.b", nn.ReLU())])
