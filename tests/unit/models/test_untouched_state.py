"""A trial leaves state in a user's modules as it was."""

import sys
import types
from collections import OrderedDict
from typing import Any

import pytest
from torch import nn

from accept_mpi.models.untouched import untouched


class Makes(OrderedDict[str, Any]):
    """A table that gives a new object whenever it is asked for one, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


@pytest.fixture
def layer() -> nn.Module:
    module = types.ModuleType("users_module")
    sys.modules["users_module"] = module
    module.table = Makes(relu=nn.ReLU)  # type: ignore[attr-defined]
    kind = type("Users", (nn.Module,), {"__module__": "users_module"})
    yield kind()
    del sys.modules["users_module"]


def test_a_table_with_a_getter_of_its_own_stays(layer: nn.Module) -> None:
    table = sys.modules["users_module"].table
    with untouched([layer]):
        table["gelu"] = nn.GELU
    assert dict(dict.items(table)) == {"relu": nn.ReLU}
    assert isinstance(table["relu"], nn.ReLU)


def test_what_a_method_refers_to_is_restored() -> None:
    """A class within a function counts in a list of that function."""
    calls = [0]

    class Counts(nn.Module):
        def forward(self, x: Any) -> Any:
            calls[0] += 1
            return x

    counts = Counts()
    with untouched([counts]):
        counts(1)
    assert calls == [0]
