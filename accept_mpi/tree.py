"""Values that layers pass on, as trees whose leaves are tensors and constants.

``flatten`` separates a value into its tensors, in order, and a *tree*: a few bytes (MessagePack) that say how to put them
together again, constants included. Equal bytes mean the same structure and the same constants, of the same types. A tensor
that occurs twice is one tensor on the other side, too.

Trees are made of: tensors, NumPy arrays, None, bool, int, float, complex, str, bytes, ``torch.Size``, ``torch.dtype``,
``torch.device``, tuples, lists, dicts (also ``OrderedDict`` and its dataclass-like subclasses), named tuples and
dataclasses. Classes are stored by name, and must be importable under that name where the value is put together.
"""

import dataclasses
import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch

Tree = bytes

_MOST_DEEP = 64
_TENSOR, _ARRAY, _CONSTANT, _COMPLEX, _SIZE, _TORCH = "t", "a", "c", "j", "size", "torch"
_TUPLE, _LIST, _DICT, _ORDERED, _NAMED, _FIELDS, _MAPPING = "tuple", "list", "dict", "ordered", "named", "fields", "mapping"
_CONSTANTS = (type(None), bool, int, float, str, bytes)


class NotATree(TypeError):
    """A value that cannot be taken apart or put together; the message says which part of it."""


def flatten(value: Any) -> tuple[list[torch.Tensor], Tree]:
    """Tensors of a value, each once, and its tree. Raises NotATree."""
    if type(value) is torch.Tensor and value.layout is torch.strided:
        return [value], LONE
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}
    nodes = _node(value, tensors, places, 0)
    try:
        return tensors, msgspec.msgpack.encode(nodes)
    except (OverflowError, UnicodeEncodeError) as error:
        raise NotATree(f"a constant that cannot be sent: {error}") from error


def unflatten(tree: Tree, tensors: Sequence[Any], classes: bool = True) -> Any:
    """Put together the value that ``flatten`` took apart. ``classes``: allow instances of classes, which are imported by
    name; pass False for data that another program may have written. Raises NotATree."""
    if tree == LONE:
        return tensors[0]
    try:
        return _build(_nodes(tree), tensors, classes)
    except (msgspec.DecodeError, IndexError, TypeError, ValueError, AttributeError, ImportError, RecursionError) as error:
        raise NotATree(f"a tree that cannot be put together: {error}") from error


def leaves(value: Any) -> list[torch.Tensor]:
    """Tensors of a value, each once. Parts that are not trees are skipped."""
    found: dict[int, torch.Tensor] = {}
    _find(value, found, 0)
    return list(found.values())


def replace(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same value with ``change`` applied to each tensor. A value that is not a tree is returned as it is."""
    try:
        tensors, tree = flatten(value)
    except NotATree:
        return value
    return unflatten(tree, [change(tensor) for tensor in tensors])


def describe(value: Any) -> str:
    """Shapes and types of a value's tensors, such as "(4, 8) float32, (4,) int64"; the value's type if it has no tensors."""
    shapes = [f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in leaves(value)]
    return ", ".join(shapes) or type(value).__name__


def stack(values: Sequence[Any], tensor: Callable[[Any], torch.Tensor] | None = None) -> Any:
    """Combine samples into one value: each of their tensors, arrays or numbers is stacked along a new first dimension.
    ``tensor`` converts an array or number (default: ``as_tensor``). Parts of dicts go by their keys, in any order.

    Raises ValueError, RuntimeError or TypeError if samples differ in structure, shape or type.
    """
    if _is_structure(values[0]):
        parts, tree = zip(*(_parts(_in_order_of(values[0], value)) for value in values), strict=True)
        if len(set(tree)) > 1:
            raise ValueError("some samples are made up of other parts than others")
        return _build(_nodes(tree[0]), [stack(part, tensor) for part in zip(*parts, strict=True)], True)
    return torch.stack([(tensor or as_tensor)(value) for value in values])


def _in_order_of(first: Any, value: Any) -> Any:
    """A sample whose dicts have their keys in the order of another's, if they have the same ones."""
    if type(value) is not type(first):
        return value
    if type(value) in (dict, OrderedDict) and value.keys() == first.keys():
        return type(value)((key, _in_order_of(one, value[key])) for key, one in first.items())
    if type(value) in (tuple, list) and len(value) == len(first) and _is_structure(value):
        return type(value)(map(_in_order_of, first, value))
    return value


def _is_structure(sample: Any) -> bool:
    """True if a sample has parts that are stacked separately. A list of numbers has none."""
    if isinstance(sample, list):
        return any(isinstance(part, torch.Tensor | np.ndarray | tuple | dict) for part in sample)
    return isinstance(sample, tuple | dict)


def as_tensor(value: Any) -> torch.Tensor:
    """Tensor from an array or number, whatever its byte order. Raises TypeError or ValueError for anything else."""
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.isnative:
        value = np.asarray(value).astype(value.dtype.newbyteorder("="))
    return torch.as_tensor(value)


# --------------------------------------------------------------------------------------------------------------------------


def _node(value: Any, tensors: list[torch.Tensor], places: dict[int, int], depth: int) -> Any:
    if depth > _MOST_DEEP:
        raise NotATree(f"values nested more than {_MOST_DEEP} deep")
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            raise NotATree("a sparse, nested or quantized tensor")
        if id(value) not in places:
            places[id(value)] = len(tensors)
            tensors.append(value)
        return [_TENSOR, places[id(value)]]
    if kind in _CONSTANTS:
        if kind is int and not -(1 << 63) <= value < 1 << 63:
            raise NotATree("an integer of more than 64 bits")
        return [_CONSTANT, value]
    if isinstance(value, np.ndarray | np.generic):
        try:
            tensors.append(as_tensor(value))
        except (TypeError, ValueError) as error:
            raise NotATree(f"an array of {value.dtype}") from error
        return [_ARRAY, len(tensors) - 1, isinstance(value, np.generic)]
    if kind is complex:
        return [_COMPLEX, value.real, value.imag]
    if kind is torch.Size:
        return [_SIZE, *value]
    if kind in (torch.dtype, torch.device):
        return [_TORCH, kind.__name__, str(value).removeprefix("torch.")]

    def nodes(of: Any) -> list[Any]:
        return [_node(child, tensors, places, depth + 1) for child in of]

    if isinstance(value, dict) and (strange := [key for key in value if type(key) not in _CONSTANTS]):
        raise NotATree(f"a dict with a {type(strange[0]).__name__} as a key")

    if kind in (tuple, list):
        return [_TUPLE if kind is tuple else _LIST, *nodes(value)]
    if kind in (dict, OrderedDict):
        return [_DICT if kind is dict else _ORDERED, *nodes(value), *nodes(value.values())]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return [_NAMED, _name_of(kind), *nodes(value)]
    if isinstance(value, dict):  # such as transformers' ModelOutput
        return [_MAPPING, _name_of(kind), *nodes(value), *nodes(value.values())]
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return [_FIELDS, _name_of(kind), fields, *nodes(getattr(value, name) for name in fields)]
    raise NotATree(f"a {kind.__module__}.{kind.__qualname__}".replace("a builtins.", "a "))


def _build(node: Any, tensors: Sequence[Any], classes: bool) -> Any:
    kind, *rest = node
    if kind == _TENSOR:
        return tensors[rest[0]]
    if kind == _CONSTANT:
        return rest[0]
    if kind == _ARRAY:
        array = tensors[rest[0]].detach().numpy()
        return array[()] if rest[1] else array
    if kind == _COMPLEX:
        return complex(*rest)
    if kind == _SIZE:
        return torch.Size(rest)
    if kind == _TORCH:
        return getattr(torch, rest[1]) if rest[0] == "dtype" else torch.device(rest[1])
    if kind in (_NAMED, _FIELDS, _MAPPING):
        if not classes:
            raise NotATree(f"an instance of {rest[0]}")
        return _instance(kind, _class(rest[0]), rest[1:], tensors)
    if kind not in (_TUPLE, _LIST, _DICT, _ORDERED):
        raise ValueError(f"an unknown kind of node, {kind}")
    children = [_build(child, tensors, classes) for child in rest]
    if kind == _TUPLE:
        return tuple(children)
    if kind == _LIST:
        return children
    pairs = zip(children[: len(children) // 2], children[len(children) // 2 :], strict=True)
    return dict(pairs) if kind == _DICT else OrderedDict(pairs)


def _instance(kind: str, cls: Any, rest: list[Any], tensors: Sequence[Any]) -> Any:
    """Put together a named tuple, a dataclass or a mapping."""
    if kind == _FIELDS:
        fields, rest = rest[0], rest[1:]
    children = [_build(child, tensors, True) for child in rest]
    if not isinstance(cls, type):
        raise TypeError(f"{cls} is not a class")
    fits = {_NAMED: hasattr(cls, "_fields"), _MAPPING: issubclass(cls, dict), _FIELDS: dataclasses.is_dataclass(cls)}
    if not fits[kind]:
        raise TypeError(f"{cls} is no such class")
    if kind == _NAMED:
        return cls(*children)
    if kind == _MAPPING:
        half = len(children) // 2
        return cls(**dict(zip(children[:half], children[half:], strict=True)))
    made: Any = object.__new__(cls)  # as copy.copy does: __init__ and __post_init__ ran where the value was made
    for name, child in zip(fields, children, strict=True):
        object.__setattr__(made, name, child)
    return made


def _children(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, tuple | list):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return ()


def _parts(value: Any) -> tuple[list[Any], Tree]:
    """Parts of a sample, of any type, and the tree that puts them together."""
    parts: list[Any] = []
    return parts, msgspec.msgpack.encode(_part(value, parts, 0))


# The recursive functions below are not nested in others: a recursive closure is a reference cycle, which would keep tensors
# alive until the garbage collector runs.


def _find(value: Any, found: dict[int, torch.Tensor], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found.setdefault(id(value), value)
    elif depth < _MOST_DEEP:
        for child in _children(value):
            _find(child, found, depth + 1)


def _part(one: Any, parts: list[Any], depth: int) -> Any:
    if depth > _MOST_DEEP:
        raise NotATree(f"values nested more than {_MOST_DEEP} deep")
    kind = type(one)
    if kind is tuple or (kind is list and _is_structure(one)):
        return [_TUPLE if kind is tuple else _LIST, *(_part(child, parts, depth + 1) for child in one)]
    if kind in (dict, OrderedDict):
        keys = [[_CONSTANT, key] for key in one]
        children = (_part(child, parts, depth + 1) for child in one.values())
        return [_DICT if kind is dict else _ORDERED, *keys, *children]
    if isinstance(one, tuple) and hasattr(kind, "_fields"):
        return [_NAMED, _name_of(kind), *(_part(child, parts, depth + 1) for child in one)]
    if one is None:
        return [_CONSTANT, None]
    if isinstance(one, dict):
        keys = [[_CONSTANT, key] for key in one]
        return [_MAPPING, _name_of(kind), *keys, *(_part(child, parts, depth + 1) for child in one.values())]
    if _is_structure(one):
        raise NotATree(f"a {kind.__qualname__}")
    parts.append(one)
    return [_TENSOR, len(parts) - 1]


def _name_of(cls: type) -> str:
    """Name of a class as "module:Class". Raises NotATree if the class cannot be imported under it."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        found = _class(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not cls:
        raise NotATree(f"a {cls.__qualname__}, a class that cannot be imported as {name}")
    return name


@lru_cache(maxsize=64)
def _class(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@lru_cache(maxsize=256)
def _nodes(tree: Tree) -> Any:
    return msgspec.msgpack.decode(tree)


LONE: Tree = msgspec.msgpack.encode([_TENSOR, 0])
"""Tree of a single tensor."""


def packed(count: int) -> Tree:
    """Tree of a single tensor, or of a tuple of ``count`` tensors: what layers usually return."""
    return LONE if count == 1 else msgspec.msgpack.encode([_TUPLE, *([_TENSOR, n] for n in range(count))])
