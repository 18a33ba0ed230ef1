"""A model's parts by their dotted names."""

from torch import nn


def part_at(model: nn.Module, path: str) -> nn.Module:
    """The part of a model with this name, as ``named_modules`` gives it; the model itself for "". Raises AttributeError if
    there is none. ``get_submodule`` finds none whose name is that of a method (``parameters``)."""
    found: nn.Module | None = model
    for name in path.split(".") if path else ():
        found = None if found is None else found._modules.get(name)
    if found is None:
        raise AttributeError(f"no part is called {path}")
    return found


def parameter_at(model: nn.Module, name: str) -> nn.Parameter:
    """The parameter with this name, as ``named_parameters`` gives it."""
    path, _, last = name.rpartition(".")
    found = part_at(model, path)._parameters[last]
    assert found is not None
    return found
