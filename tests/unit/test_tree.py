"""Values taken apart into tensors and a tree, and put together again."""

from collections import OrderedDict
from typing import Any

import nets
import numpy as np
import pytest
import torch

from accept_mpi import tree
from accept_mpi.pipeline.state import unpacked

T = torch.arange(6.0).reshape(2, 3)

VALUES: list[Any] = [
    T,
    (T,),
    [T, (T * 2, None, True, 1, 1.5, "x", b"y", 2 + 3j)],
    {"a": T, 3: {"b": [T * 3]}, None: ()},
    OrderedDict(b=T, a=1),
    nets.Point(T, [1]),
    nets.Record(T, {"k": nets.Point(None, 2)}),
    (T.shape, torch.float16, torch.device("cpu")),
    (np.arange(3, dtype=np.int16), np.float64(2.5)),
    None,
    [],
]


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, nets.Record):
        return same(a.a, b.a) and same(a.b, b.b)
    return bool(a == b)


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_there_and_back(number: int) -> None:
    value = VALUES[number]
    tensors, of = tree.flatten(value)
    assert same(tree.unflatten(of, [tensor.clone() for tensor in tensors]), value)


def test_constants_differ_by_type_and_value() -> None:
    trees = [tree.flatten((T, constant))[1] for constant in (1, True, 1.0, None, "1", 2, [], ())]
    assert len(set(trees)) == len(trees)
    assert tree.flatten((T, 1))[1] == tree.flatten((T * 2, 1))[1]
    assert tree.packed(1) == tree.flatten(T)[1]
    assert tree.packed(2) == tree.flatten((T, T * 2))[1]


def test_a_tensor_that_comes_twice_is_one() -> None:
    tensors, of = tree.flatten([T, {"again": T}])
    assert len(tensors) == 1
    back = tree.unflatten(of, tensors)
    assert back[0] is back[1]["again"]


def test_what_is_no_tree() -> None:
    class Here:
        pass

    deep: Any = T
    for _ in range(100):
        deep = [deep]
    for value in (Here(), {T: 1}, 1 << 70, T.to_sparse(), deep, {"a": {1, 2}}, np.array(["x"])):
        with pytest.raises(tree.NotATree):
            tree.flatten(value)


def test_what_another_wrote_makes_no_instances() -> None:
    """A checkpoint may come from anywhere: names in it are not imported."""
    _, of = tree.flatten(nets.Point(1, 2))
    assert tree.unflatten(of, []) == nets.Point(1, 2)
    with pytest.raises(tree.NotATree):
        tree.unflatten(of, [], classes=False)
    import msgspec

    for node in (["named", "os:system", ["c", "true"]], ["mapping", "subprocess:Popen", ["c", "args"], ["c", "true"]]):
        with pytest.raises(tree.NotATree, match=r"no such class|not a class"):
            tree.unflatten(msgspec.msgpack.encode(node), [])
    for noise in (
        b"",
        b"\xff",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode(["t", 9]),
        msgspec.msgpack.encode({"a": 1}),
    ):
        with pytest.raises(tree.NotATree):
            tree.unflatten(noise, [T])
    assert unpacked(T) is T


def test_nothing_is_kept_until_the_collector_runs() -> None:
    """Recursive closures kept all activations of a probe's rounds."""
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        value = {"a": [torch.zeros(3), (torch.ones(2), None)]}
        known = [weakref.ref(one) for one in tree.leaves(value)]
        tensors, of = tree.flatten(value)
        tree.unflatten(of, tensors)
        tree.stack([(value, 1), (value, 2)])
        tree.describe(value)
        del value, tensors
        assert not any(one() is not None for one in known)
    finally:
        gc.enable()


def test_samples_are_stacked_part_by_part() -> None:
    found = tree.stack([({"a": T, "b": 1}, [0.5, 1.5]), ({"a": T, "b": 2}, [2.5, 3.5])])
    assert found[0]["a"].shape == (2, 2, 3)
    assert found[0]["b"].tolist() == [1, 2]
    assert found[1].tolist() == [[0.5, 1.5], [2.5, 3.5]]
    with pytest.raises(ValueError, match="other parts"):
        tree.stack([(T, T), (T, T, T)])
    big = np.arange(3, dtype=">f4")
    assert tree.stack([big, big]).tolist() == [[0, 1, 2]] * 2
