"""Models that call ``view`` on images, as most tutorials do: channels_last must not keep them from training."""

from collections.abc import Callable
from typing import Any

import elsewhere
import pytest
import torch
from recorded_models import recorded
from torch import nn
from torch.nn import functional

from accept_mpi.errors import UserError
from accept_mpi.models.base import Chain
from accept_mpi.models.layers import build_layers, calls_view
from accept_mpi.models.memory import lay_out
from accept_mpi.profiling.outline import outline


class LeNet(nn.Module):
    """As in torch's first tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool, self.relu = nn.MaxPool2d(2), nn.ReLU(inplace=True)
        self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 12), nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.pool(self.relu(self.conv1(x)))
        x = self.relu(self.pool(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        return self.fc2(functional.relu(self.fc1(x)))


class LikeAnother(LeNet):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.pool(self.relu(self.conv2(self.pool(self.conv1(x)))))
        return self.fc2(functional.relu(self.fc1(x.view_as(x.new_zeros(len(x), 16 * 5 * 5)))))


class Writes(LeNet):
    """Writes to the images by a view of them, so that a copy would not do."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.pool(self.pool(self.conv1(x)))
        x.view(len(x), -1).mul_(2)
        return self.fc2(self.fc1(x[:, :, :5, :5].repeat(1, 3, 1, 1)[:, :16].flatten(1)))


class Windows(LeNet):
    """Windows of images by ``as_strided``, with strides that it asks for."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.writes = writes

    def forward(self, x: torch.Tensor) -> Any:
        x = self.relu(self.conv1(x))
        n, c, h, w = x.shape
        if self.writes:
            x.as_strided((n, c), x.stride()[:2]).mul_(2.0)
        part = x[:, 1:]
        x = torch.as_strided(x, (n, c, h - 2, w, 3), (*x.stride(), w)).amax(-1)
        x = x + part.as_strided((n, 1, h - 2, w), part.stride(), part.storage_offset())
        x = self.pool(self.relu(self.conv2(self.pool(x)[:, :, :13, :14])))
        return self.fc2(functional.relu(self.fc1(functional.pad(x.flatten(1), (0, 80)))))


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(len(x), -1)


class Flat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _flat(x)


class FlatElsewhere(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return elsewhere.flat(x)


class FlatLikeAnother(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x.flatten(1))


def computed(chain: Chain, x: torch.Tensor, memory_format: Any) -> torch.Tensor:
    value: Any = x.contiguous(memory_format=memory_format)
    for layer in build_layers(chain, 0, len(chain), 0).modules:
        value = layer.to(memory_format=memory_format)(value)  # type: ignore[call-overload]
    return value  # type: ignore[no-any-return]


def check_either_format(model: Callable[[], nn.Module]) -> tuple[Chain, torch.Tensor, torch.Tensor]:
    """A recorded model gives in the contiguous format what the plain one gives; returns its chain, images and that."""
    x = torch.randn(2, 3, 32, 32)
    chain = recorded(model, x)
    torch.manual_seed(7)
    plain = model()(x)
    assert torch.equal(computed(chain, x, torch.contiguous_format), plain)
    return chain, x, plain


class Complex(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(x.unflatten(-1, (-1, 2))).abs().flatten(1)


class Diagonals(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((len(x), 8), (x[0].numel(), 1))


class Halves(LeNet):
    """Complex numbers."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.pool(self.conv1(x))
        return self.fc2(self.fc1(torch.view_as_complex(x.unflatten(-1, (-1, 2))).abs().flatten(1)[:, :400]))


@pytest.mark.parametrize("model", [LeNet, LikeAnother, Windows, Halves])
def test_a_recorded_model_is_viewed_in_either_format(model: type[nn.Module]) -> None:
    """Of windows, strides are constants of a record; with them another layout gave other windows, silently."""
    chain, x, plain = check_either_format(model)
    assert torch.allclose(computed(chain, x, torch.channels_last), plain, atol=1e-6)
    assert not calls_view(build_layers(chain, 0, len(chain), 0).modules)


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [(Writes, RuntimeError, "view size is not compatible"), (lambda: Windows(writes=True), UserError, "as_strided")],
)
def test_what_is_written_by_a_view_is_no_copy(model: Callable[[], nn.Module], error: type[Exception], said: str) -> None:
    chain, x, _ = check_either_format(model)
    with pytest.raises(error, match=said):
        computed(chain, x, torch.channels_last)


@pytest.mark.parametrize("flat", [Flat, FlatElsewhere, FlatLikeAnother, Complex, Diagonals, nn.Flatten])
def test_a_chain_whose_code_calls_view_is_contiguous(flat: type[nn.Module]) -> None:
    def again() -> Any:
        return list(
            zip("abc", [nn.Conv2d(3, 4, 5), flat(), nn.Linear(8 if flat in (Complex, Diagonals) else 16, 10)], strict=True)
        )

    chain = Chain(again(), again)
    found = outline(chain, 0, (torch.randn(2, 3, 6, 6),))
    assert found.channels_last == (flat is nn.Flatten)
    assert build_layers(chain, 0, 3, 0).likes_channels_last == (True, flat is not nn.Flatten)


class Frames(nn.Module):
    """Images, and short films of them: kernels of four and of five dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.film = nn.Conv2d(3, 4, 3), nn.Conv3d(1, 2, 3)
        self.table = nn.Parameter(torch.randn(1, 2, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.film(self.image(x).unsqueeze(1)) * self.table).mean((2, 3, 4))


def test_what_has_five_dimensions_stays_as_it_is() -> None:
    """``nn.Module.to`` refuses to convert it, and channels_last is the default where there are 2-D convolutions."""
    chain, x, plain = check_either_format(Frames)
    assert outline(chain, 0, (x,)).channels_last
    value: Any = x.contiguous(memory_format=torch.channels_last)
    layers = build_layers(chain, 0, len(chain), 0).modules
    lay_out(layers, torch.channels_last)
    for layer in layers:
        value = layer(value)
    assert torch.allclose(value, plain, atol=1e-6)
    (image,) = [one for layer in layers for one in layer.parameters() if one.dim() == 4]
    assert image.is_contiguous(memory_format=torch.channels_last)
