"""Weights that a run begins with, from a file of which each rank reads only what its layers need."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from xxhash import xxh3_64

from accept_mpi.errors import UserError, counted
from accept_mpi.files.hdf5 import json_in
from accept_mpi.files.regular import is_regular, open_regular

_SHOWN = 3
_PLACES, _PLACE = 64, 4096  # places that are looked at in a file, and their bytes
_INDEX = ".index.json"
_OURS = "manifest.json", "checkpoints"  # in a checkpoint, and in a run's directory
_INSIDE = "state_dict", "model", "model_state_dict"


class WeightsFile:
    """Tensors by the names of the whole model: a .safetensors file, a file of ``torch.save`` (.pt, .pth, .bin), or several
    of them with an index, as transformers writes (the index, or the folder it is in)."""

    def __init__(self, path: Path, strict: bool) -> None:
        """Raises UserError if the file cannot be read."""
        self.path, self._strict = path, strict
        self._opened: dict[Path, _Source] = {}
        self._places = self._files()
        """The file in which each tensor is."""
        self._alias: dict[str, str] = {}
        """For names of tensors that have several: the one under which the file has them."""

    def check(
        self,
        names: Sequence[str],
        shapes: Mapping[str, Sequence[int]],
        aliases: Iterable[Sequence[str]],
        optional: Collection[str] = (),
    ) -> str:
        """Compare the file with the state of the whole model, ``names``, with the ``shapes`` of tensors; ``aliases``: groups
        of names of one tensor, of which the last that the file has counts, as for ``load_state_dict``; ``optional``: names
        that may be missing. Returns a line on what is left out. Raises UserError unless all fit, or some and the job allows
        it."""
        known = set(names)
        other = [name for name in names if name in self._places and self._shape(name) != tuple(shapes[name])]
        for group in aliases:
            there = [name for name in group if name in self._places and name in known and name not in other]
            self._alias |= {name: there[-1] for name in group if there}
        missing = [n for n in names if n not in self._places and n not in self._alias and n not in optional]
        strange = [name for name in self._places if name not in known]
        parts = [
            f"it lacks {_show(missing)}" if missing else "",
            f"it has {_show(strange)}, which the model has not" if strange else "",
            f"{other[0]} is {self._shape(other[0])} in it and {tuple(shapes[other[0]])} in the model" if other else "",
        ]
        for name in other:
            del self._places[name]
        left = [*missing, *(name for name in other if name not in self._alias)]
        loaded = sum(1 for name in names if name in self._places or name in self._alias)
        if (self._strict and any(parts)) or not loaded:
            way = "strict = false loads what fits" if loaded else _renamed(strange, missing) or "nothing in it fits"
            raise UserError(f"model.weights: {self.path} does not fit the model: {'; '.join(filter(None, parts))}; {way}")
        return f"{self.path}: {counted(loaded, 'tensor')} loaded" + (f", {_show(left)} left as they are" if left else "")

    def load(self, layer: nn.Module, prefix: str) -> None:
        """Load a layer's tensors. ``prefix``: what their names in the model have in front. Raises UserError."""
        state = layer.state_dict(keep_vars=True)
        with torch.no_grad():
            for key, own in state.items():
                name = self._alias.get(prefix + key, prefix + key)
                if name in self._places and isinstance(own, torch.Tensor):
                    own.copy_(self._in(self._places[name]).tensor(name))

    def glimpse(self) -> str:
        """Checksum of the files' sizes and of some places in them, which tells other weights without reading all of them.
        Raises UserError if they cannot be read."""
        digest = xxh3_64()
        for path in sorted(set(self._places.values())):
            try:
                with open_regular(path) as file:
                    size = file.seek(0, os.SEEK_END)
                    digest.update(f"{path.name} {size}".encode(errors="surrogateescape"))
                    for place in range(_PLACES + 1):
                        file.seek(max(0, size - _PLACE) * place // _PLACES)
                        digest.update(file.read(_PLACE))
            except OSError as error:
                raise UserError(f"model.weights: {path} cannot be read: {error.strerror}") from error
        return digest.hexdigest()

    def close(self) -> None:
        """Let go of what has been read."""
        self._opened = {}

    # ------------------------------------------------------------------------------------------------------------------

    def _files(self) -> dict[str, Path]:
        path = self.path
        try:
            folder = path.is_dir()
        except OSError as error:
            raise UserError(f"model.weights: {path} cannot be read: {error.strerror}") from error
        if folder:
            found = sorted(path.glob(f"*{_INDEX}")) or sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
            if len(found) != 1:
                ours = any(os.path.lexists(path / own) for own in _OURS)
                way = "it is of a run of this program: `export` makes a file of it" if ours else "name one"
                raise UserError(f"model.weights: {path} holds {len(found)} files of weights; {way}")
            path = found[0]
        if not is_regular(path):
            raise UserError(f"model.weights: {path}: there is no such file on this host")
        if path.name.endswith(_INDEX):
            try:
                table = json_in(path.read_text(), "the index")["weight_map"]
                return {name: path.parent / Path(file).name for name, file in table.items()}
            except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
                raise UserError(f"model.weights: {path} is no index of files of weights: {error}") from error
        self.path = path
        return dict.fromkeys(self._in(path).names, path)

    def _in(self, path: Path) -> "_Source":
        """One of the files, opened once."""
        if path not in self._opened:
            self._opened[path] = _Safetensors(path) if path.suffix == ".safetensors" else _Torch(path)
        return self._opened[path]

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._in(self._places[name]).shape(name)


class _Source(Protocol):
    """A file of tensors. Its methods raise UserError if it cannot be read."""

    names: Collection[str]

    def tensor(self, name: str) -> torch.Tensor: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(path, framework="pt")
            self.names: Collection[str] = set(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"model.weights: {path} cannot be read: {error}") from error

    def tensor(self, name: str) -> torch.Tensor:
        with self._reading(name):
            found: torch.Tensor = self._file.get_tensor(name)
            return found

    def shape(self, name: str) -> tuple[int, ...]:
        with self._reading(name):
            return tuple(self._file.get_slice(name).get_shape())

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise UserError(f"model.weights: {name} cannot be read from {self._path}: {error}") from error


class _Torch:
    """A file of ``torch.save``, mapped into memory where its format allows."""

    def __init__(self, path: Path) -> None:
        found: Any = None
        for mapped in (True, False):
            try:
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
                break
            except Exception as error:
                if not mapped:
                    reason = str(error).split("\n")[0]
                    if isinstance(error, UnpicklingError) or "TorchScript" in reason:
                        reason = "it is damaged, or holds more than tensors and plain values: save the model's state_dict()"
                    raise UserError(f"model.weights: {path} cannot be read: {reason}") from error
        for key in _INSIDE:
            if isinstance(found, dict) and isinstance(found.get(key), dict):
                found = found[key]
        if not isinstance(found, dict):
            raise UserError(f"model.weights: {path} holds a {type(found).__name__} instead of a state_dict")
        if not any(map(_is_tensor, found.values())):
            inside = [key for key, one in found.items() if _is_state(one)]
            if len(inside) > 1:
                names = _show([*map(str, inside)])
                raise UserError(f"model.weights: {path} holds several state_dicts ({names}): save the one that is meant")
            found = found[inside[0]] if inside else found
        self._path = path
        self._tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        self.names: Collection[str] = self._tensors.keys()

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise UserError(f"model.weights: {name} cannot be read from {self._path}: there is no such tensor")
        found = self._tensors[name]
        if found.is_meta or found.is_quantized or found.layout is not torch.strided:
            kind = "without values (on the meta device)" if found.is_meta else "sparse, nested or quantized"
            raise UserError(f"model.weights: {name} in {self._path} is a tensor {kind}; save plain tensors")
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor(name).shape)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_state(value: Any) -> bool:
    """True if a value is a state_dict, not an optimizer's."""
    return isinstance(value, dict) and all(isinstance(name, str) for name in value) and any(map(_is_tensor, value.values()))


def _renamed(there: Sequence[str], wanted: Sequence[str]) -> str:
    """What names have in front, if those that are there and those that are wanted differ by that; else empty."""
    for longer, shorter, text in ((there, wanted, "its names have"), (wanted, there, "the model's names have")):
        short = set(shorter)
        for name in longer:
            for at in (n + 1 for n, letter in enumerate(name) if letter == "."):
                if name[at:] in short:
                    return f"{text} \"{name[:at]}\" in front, and the other's have not: save them under the model's names"
    return ""


def _show(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
