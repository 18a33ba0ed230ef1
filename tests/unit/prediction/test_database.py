"""The latency database: what is kept comes back, what is damaged or foreign is set aside and kept."""

import multiprocessing
from pathlib import Path

import h5py
import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models import as_chain
from accept_mpi.prediction import database
from accept_mpi.prediction.database import (
    check_database,
    database_path,
    device_key,
    keep_predictor,
    library,
    observe,
    recall,
    recall_predictor,
    remember,
)
from accept_mpi.prediction.predictor import Predictor
from accept_mpi.prediction.samples import known_of
from accept_mpi.profiling.layer_times import LayerTimes
from accept_mpi.profiling.outline import Outline, outline

FACTS = {"host": "edge1", "cores": 4}
KEY = device_key(FACTS)


def model(layers: int = 3, samples: int = 5) -> Outline:
    return outline(as_chain([nn.Linear(4, 4) for _ in range(layers)]), 0, (torch.zeros(samples, 4),))


def times(value: float, layers: int = 3) -> LayerTimes:
    row = (value,) * layers
    return LayerTimes(row, row, row, row, 1.0, ((0, 2, value, value),), 1.25)


def test_what_was_measured_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "latency.h5"
    assert recall(path, model(), [KEY]) == [None]
    remember(path, model(), {KEY: (FACTS, times(0.5))})
    remember(path, model(), {"other": ({"host": "edge2"}, times(0.25))})
    first, second, unknown = recall(path, model(), [KEY, "other", "nobody"])
    assert first is not None
    assert second is not None
    assert unknown is None
    assert (first.forward, first.stretch, first.pieces) == ((0.5,) * 3, 1.25, ((0, 2, 0.5, 0.5),))
    assert second.backward == (0.25,) * 3
    remember(path, model(), {KEY: (FACTS, times(0.75))})
    assert recall(path, model(), [KEY])[0].forward == (0.75,) * 3
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".h5"] == ["latency.h5"]


def test_another_model_or_size_is_another_entry(tmp_path: Path) -> None:
    path = tmp_path / "latency.h5"
    remember(path, model(), {KEY: (FACTS, times(0.5))})
    assert recall(path, model(layers=4), [KEY]) == [None]
    assert recall(path, model(samples=6), [KEY]) == [None]


@pytest.mark.parametrize("damage", ["text", "truncated", "foreign", "future"])
def test_what_cannot_be_read_is_set_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "latency.h5"
    remember(path, model(), {KEY: (FACTS, times(0.5))})
    content = path.read_bytes()
    if damage == "text":
        path.write_text("not HDF5")
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        with h5py.File(path, "a") as file:
            file.attrs["format" if damage == "foreign" else "version"] = "another program's" if damage == "foreign" else 99
    before = path.read_bytes()
    assert recall(path, model(), [KEY]) == [None]
    kept = [p for p in tmp_path.iterdir() if "set-aside" in p.name]
    assert [p.read_bytes() for p in kept] == [before]
    assert "kept as" in caplog.text
    remember(path, model(), {KEY: (FACTS, times(0.5))})
    assert recall(path, model(), [KEY])[0] is not None


def test_what_never_was_a_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latency.h5"
    for good in ("none", "auto", str(path)):
        check_database(good)
    remember(path, model(), {KEY: (FACTS, times(0.5))})
    check_database(str(path))
    path.write_bytes(path.read_bytes()[:3000])  # damaged: to be set aside
    check_database(str(path))
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = 1
    (tmp_path / "thesis.tex").write_text("text")
    (tmp_path / "lost").symlink_to("nowhere")
    for name, message in (
        ("data.h5", r"data.h5 is no latency database; expected one"),
        ("thesis.tex", "thesis.tex is no latency database"),
        (".", "it is a directory, not a file"),
        ("lost", "cannot read .*lost: No such file"),
    ):
        with pytest.raises(UserError, match=f"pipeline.latency_db: .*{message}"):
            check_database(str(tmp_path / name))
    assert (tmp_path / "thesis.tex").read_text() == "text"


def test_a_damaged_entry_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "latency.h5"
    remember(path, model(), {KEY: (FACTS, times(0.5))})
    with h5py.File(path, "a") as file:
        file[model().key][KEY]["times"][0, 0] = float("nan")
    assert recall(path, model(), [KEY]) == [None]
    with h5py.File(path, "a") as file:
        del file[model().key][KEY]["times"]
    assert recall(path, model(), [KEY]) == [None]


def _writer(path: Path, number: int) -> None:
    remember(path, model(), {f"device{number}": (FACTS, times(number + 1.0))})


def test_what_is_too_damaged_to_be_changed_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 raises KeyError where it cannot delete what is damaged: a run ended with it, after its last step."""
    path = tmp_path / "latency.h5"
    remember(path, model(), {KEY: (FACTS, times(0.5))})
    delete, damaged = h5py.Group.__delitem__, [1, 1]

    def cannot(group: h5py.Group, name: str) -> None:
        if damaged:
            damaged.pop()
            raise KeyError("Couldn't delete link (mantissa and exponent positions overlap)")
        delete(group, name)

    monkeypatch.setattr(h5py.Group, "__delitem__", cannot)
    observe(path, model(), {KEY: [(0, 2, 0.5, 0.5)]})
    assert recall(path, model(), [KEY]) == [None]
    remember(path, model(), {KEY: (FACTS, times(0.5))})
    remember(path, model(), {KEY: (FACTS, times(0.25))})
    assert recall(path, model(), [KEY])[0].forward == (0.25,) * 3
    assert sum(".set-aside-" in one.name for one in tmp_path.iterdir()) == 2


def test_times_of_nothing_do_not_count(tmp_path: Path) -> None:
    """Other devices' times were scaled by the quotient of both."""
    path = tmp_path / "latency.h5"
    remember(path, model(), {KEY: (FACTS, times(0.0))})
    assert recall(path, model(), [KEY]) == [None]


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "latency.h5"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_writer, args=(path, number)) for number in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(600)
    found = recall(path, model(), [f"device{number}" for number in range(6)])
    assert [one.forward[0] if one else None for one in found] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    remember(tmp_path / "file" / "latency.h5", model(), {KEY: (FACTS, times(0.5))})
    assert "cannot be written" in caplog.text


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As another user's home directory, which is that of a process in a container or under sudo: a name that is too long
    fails so for root, too."""
    path = tmp_path / ("n" * 300) / "latency.h5"
    assert recall(path, model(), [KEY]) == [None]
    remember(path, model(), {KEY: (FACTS, times(0.5))})
    observe(path, model(), {KEY: []})
    assert caplog.text.count("cannot be written") == 1


def test_what_stages_took_is_added(tmp_path: Path) -> None:
    """Beside what was probed, the newest hundred; nothing for a device that is not known."""
    path = tmp_path / "latency.h5"
    observe(path, model(), {KEY: [(0, 1, 1.0, 2.0)]})
    assert not path.exists()
    full = msgspec.structs.replace(times(0.5), pieces=((0, 2, 0.5, 0.5), (2, 3, 0.5, 0.5)))
    remember(path, model(), {KEY: (FACTS, full)})
    observe(path, model(), {"nobody": [(0, 1, 1.0, 2.0)]})
    for number in range(150):
        observe(path, model(), {KEY: [(0, 1, 1.0, float(number))]})
    found = recall(path, model(), [KEY])[0]
    assert found.pieces == full.pieces
    assert [row[3] for row in found.observed] == list(range(50, 150))


def test_a_device_that_has_measured_a_part_comes_back(tmp_path: Path) -> None:
    """What it observed in training, to the model's end, is not taken for a probe."""
    path, nan = tmp_path / "latency.h5", float("nan")
    rows = ((0.5, nan, nan),) * 4
    part = LayerTimes(*rows, 1.0, ((0, 1, 0.5, 0.5),), 1.0)
    remember(path, model(), {KEY: (FACTS, part)})
    observe(path, model(), {KEY: [(0, 3, 1.0, 2.0)]})
    found = recall(path, model(), [KEY])[0]
    assert (found.measured, found.pieces, found.observed) == ([True, False, False], part.pieces, ((0, 3, 1.0, 2.0),))
    (known,) = library(path)
    assert known.probes.tolist() == [[0, 1]]
    assert (known.intervals.tolist(), known.times.tolist()) == ([[0, 3]], [[1, 2]])


def test_what_lanes_gain_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "latency.h5"
    remember(path, model(), {KEY: (FACTS, msgspec.structs.replace(times(0.5), lanes={2: 0.8, 4: 0.7}))})
    assert recall(path, model(), [KEY])[0].lanes == {2: 0.8, 4: 0.7}
    with h5py.File(path, "a") as file:
        file[model().key][KEY].attrs["lanes"] = '{"1": -3}'
    assert recall(path, model(), [KEY]) == [None]
    with h5py.File(path, "a") as file:  # as early versions wrote it
        del file[model().key][KEY].attrs["lanes"]
    assert recall(path, model(), [KEY])[0].lanes == {}


def test_paths() -> None:
    assert database_path("none") is None
    assert database_path("auto").name == "latency.h5"
    assert database_path("~/x.h5") == Path.home() / "x.h5"


def test_what_is_known_is_there_to_learn_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Probes, runs of layers between clocks, and stages observed in training; of every model; the predictor beside them."""
    path = tmp_path / "latency.h5"
    assert library(path) == []
    whole = msgspec.structs.replace(times(0.5), pieces=((0, 2, 1.0, 1.0), (2, 3, 0.5, 0.5)))
    remember(path, model(), {KEY: (FACTS, whole)})
    remember(path, model(layers=4), {KEY: (FACTS, msgspec.structs.replace(times(0.25, 4), pieces=((0, 4, 1.0, 1.0),)))})
    observe(path, model(), {KEY: [(1, 3, 0.75, 1.5)]})
    three, four = sorted(library(path), key=lambda known: known.layers)
    assert (three.device, three.layers, four.layers) == (KEY, 3, 4)
    assert three.probes.tolist() == [[0, 2], [2, 3]]
    assert three.probe_times.tolist() == [[1, 1], [0.5, 0.5]]
    assert three.intervals.tolist() == [[0, 2], [1, 3]]
    assert three.times.tolist() == [[1, 1], [0.75, 1.5]]
    assert recall_predictor(path) is None
    predictor = Predictor.train([three, four], steps=2)
    keep_predictor(path, predictor)
    keep_predictor(path, predictor)
    again = recall_predictor(path)
    assert again is not None
    assert np.array_equal(again.layers(three)[0], predictor.layers(three)[0])
    assert len(library(path)) == 2
    assert recall(path, model(), [KEY])[0] is not None
    assert not caplog.text
    with h5py.File(path, "a") as file:
        del file["predictor/weights/0"]
    assert recall_predictor(path) is None
    assert 'predictor in it cannot be read and does not count: there is no "0"' in caplog.text


def test_layers_that_take_no_time_have_a_logarithm() -> None:
    known = known_of(model(), "x", msgspec.structs.replace(times(0.0), pieces=((0, 3, 0.0, 0.0),)))
    assert known.probe_times.min() > 0
    assert known.times.min() > 0


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """To a database that others use, too: it was replaced by one of its own."""
    link, path = tmp_path / "own" / "latency.h5", tmp_path / "common.h5"
    link.parent.mkdir()
    link.symlink_to(path)
    for value, to in ((0.5, link), (0.25, path), (0.75, link)):
        remember(to, model(), {KEY: (FACTS, times(value))})
        assert link.is_symlink()
        assert recall(path, model(), [KEY])[0].forward == recall(link, model(), [KEY])[0].forward == (value,) * 3


def test_it_does_not_grow_with_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 does not use again what has been deleted: eight KiB a run, for ever. Nothing that can be read is lost."""
    monkeypatch.setattr(database, "_UNUSED", 1 << 15)
    path = tmp_path / "latency.h5"
    remember(path, model(4), {"other": (FACTS, times(0.25, 4))})
    keep_predictor(path, Predictor.train(library(path), steps=1))
    first = path.stat().st_size
    for number in range(100):
        remember(path, model(), {KEY: (FACTS, times(0.5))})
        observe(path, model(), {KEY: [(0, 1, 1.0, float(number))]})
        assert path.stat().st_size < 2.2 * first + (1 << 15)
    found = recall(path, model(), [KEY])[0]
    assert (found.forward, found.observed[-1][3]) == ((0.5,) * 3, 99.0)
    assert recall(path, model(4), ["other"])[0].forward == (0.25,) * 4
    assert recall_predictor(path).models == {model(4).key}
