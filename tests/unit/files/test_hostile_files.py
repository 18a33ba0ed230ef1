"""Logs, latency databases, fleets and caches of machine code that others may have written: a result or one sentence."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from accept_mpi.cli import main
from accept_mpi.device.fleet import read as read_fleet
from accept_mpi.errors import UserError
from accept_mpi.files.cache import open_lock
from accept_mpi.files.hdf5 import is_followed, open_followed
from accept_mpi.files.regular import foreign
from accept_mpi.logs.format import EVENTS, STEPS, TRACE
from accept_mpi.logs.reader import open_log
from accept_mpi.logs.timeline import plan_rows
from accept_mpi.logs.writer import LogWriter
from accept_mpi.models import as_chain
from accept_mpi.plan import make_plan
from accept_mpi.prediction.database import (
    database_path,
    device_key,
    keep_predictor,
    library,
    recall,
    recall_predictor,
    remember,
)
from accept_mpi.prediction.predictor import Predictor
from accept_mpi.profiling.layer_times import LayerTimes
from accept_mpi.profiling.outline import Outline, outline

JOB = {
    "model": {"name": "net:BODY <b>", "args": {}}, "data": {"name": "digits", "args": {}}, "pipeline": {"schedule": "1f1b"},
}  # fmt: skip


def facts(host: str = "edge") -> dict[str, Any]:
    hosts = [{"rank": r, "host": host, "machine": "x", "cores": 1, "memory_bytes": 1 << 30} for r in (0, 1)]
    return {"versions": {"torch": "2"}, "hosts": hosts, "layers": ["0", "1", "2"], "parameters": 9, "last_step": 3}


def write_log(path: Path, host: str = "edge", closed: bool = True) -> LogWriter:
    """Of two ranks and three steps."""
    plan = make_plan(3, [1])
    writer = LogWriter(path, json.dumps(JOB), plan.to_json(), facts(host))
    writer.append("steps", np.array([(s, 0, 8, 1.0, 0.5, 0.1, float(s), 8.0) for s in (1, 2, 3)], STEPS))
    rows = [(s + 0.1, s + 0.2, r, r, k, -1, -1, s, 0, 0, 0, 0) for s in (1, 2, 3) for r in (0, 1) for k in (0, 1, 3)]
    writer.append("trace", np.array(rows, TRACE))
    writer.append("plans", plan_rows(plan))
    writer.event(2.0, 2, f"lost rank 1 on {host}")
    writer.flush()
    if closed:
        writer.close()
    return writer


def changed(tmp_path: Path, change: Callable[[h5py.File], Any]) -> Path:
    """The log as a plain HDF5 file, with something else in it."""
    write_log(tmp_path / "sound.h5")
    with h5py.File(tmp_path / "sound.h5", "r") as old, h5py.File(tmp_path / "log.h5", "w") as new:
        new.attrs.update(old.attrs)
        for name in old:
            new[name] = old[name][()]
        change(new)
    return tmp_path / "log.h5"


def instead(name: str, **how: Any) -> Callable[[h5py.File], Any]:
    return lambda file: (file.__delitem__(name), file.create_dataset(name, **how))


def attribute(name: str, value: Any) -> Callable[[h5py.File], Any]:
    return lambda file: file.attrs.__setitem__(name, value)


def first_row(table: str, column: str, value: Any) -> Callable[[h5py.File], Any]:
    def change(file: h5py.File) -> None:
        rows = file[table][()]
        rows[column][0] = value
        file[table][...] = rows

    return change


def link(name: str, to: Any) -> Callable[[h5py.File], Any]:
    return lambda file: (file.__delitem__(name), file.__setitem__(name, to))


def of_fact(**what: Any) -> Callable[[h5py.File], Any]:
    return attribute("facts", json.dumps(facts() | what))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.attrs.__delitem__("version"), 'no attribute "version"'),
        (attribute("version", np.array([1, 2])), '"version" is not a number'),
        (attribute("format", np.array([1, 2])), '"format" is not a text'),
        (attribute("job", "{"), "the job is not JSON"),
        (attribute("job", "[" * 20000 + "]" * 20000), "the job is (not JSON|nested more than)"),
        (attribute("job", json.dumps(JOB | {"x": json.loads("[" * 70 + "]" * 70)})), "nested more than 64 deep"),
        (attribute("job", "[]"), "the job is not as it should be"),
        (attribute("job", b"\xff\xfe"), '"job" is not a text'),
        (attribute("plan", "{}"), "the plan is not as it should be"),
        (attribute("plan", make_plan(4, [1]).to_json()), "stages do not follow|end at layer"),
        (attribute("created", "yesterday"), '"created" is no time'),
        (attribute("created", "0001-01-01T00:00:00"), '"created" is no time'),
        (of_fact(last_step="many"), "last_step"),
        (of_fact(first_step=[]), "first_step"),
        (of_fact(hosts=3), "what is said of the run is not as it should be"),
        (of_fact(hosts=[{"host": "a"}]), "missing required field `rank`"),
        (of_fact(hosts=[{"rank": 0, "memory_bytes": "much"}]), "memory_bytes"),
        (lambda f: f.__delitem__("steps"), 'there is no "steps"'),
        (lambda f: (f.__delitem__("steps"), f.create_group("steps")), '"steps" is not a data set'),
        (instead("steps", data=np.zeros(5)), '"steps" holds float64'),
        (instead("trace", data=np.zeros(5, TRACE), compression="gzip"), '"trace" is compressed'),
        (instead("trace", shape=(10**13,), dtype=TRACE, chunks=(64,)), "more than the file"),
        (instead("events", shape=(1,), dtype=EVENTS, external=[("/etc/passwd", 0, EVENTS.itemsize)]), "in another file"),
        (link("steps", h5py.SoftLink("/steps")), '"steps" is a link to elsewhere'),
        (link("steps", h5py.ExternalLink("/nowhere.h5", "/x")), '"steps" is a link to elsewhere'),
        (first_row("trace", "kind", 200), '"trace" has a kind'),
        (first_row("trace", "direction", 9), '"trace" has a direction'),
        (first_row("trace", "kind", 6), '"trace" has a direction'),  # sent nowhere
        (first_row("trace", "rank", 7), '"trace" has a rank'),
        (first_row("trace", "stage", 3), '"trace" has a stage'),
        (first_row("trace", "end", np.inf), '"trace" has a end'),
        (first_row("plans", "stop", 9), '"plans" has a stop'),
        (first_row("steps", "step", -1), '"steps" has a step'),
    ],
)
def test_what_is_no_log_is_a_sentence(
    tmp_path: Path, change: Callable[[h5py.File], Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(tmp_path, change)
    with pytest.raises(UserError, match=message):
        open_log(path)
    for command in (["report", str(path)], ["trace", str(path), str(tmp_path / "t.json")]):
        assert main(command) == 2
        found = capsys.readouterr().err
        assert found.count("\n") == 1
        assert found.startswith(f"accept_mpi: {path}: a damaged log: ")


def test_texts_of_a_log_are_only_texts(tmp_path: Path) -> None:
    write_log(tmp_path / "log.h5", "<script>alert(1)</script> $\\nosuch{$ \x1b[31m BODY \ud800")
    assert main(["report", str(tmp_path / "log.h5")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert page.count("<h2>Stages</h2>") == 1
    assert "net:BODY &lt;b&gt;" in page
    assert main(["trace", str(tmp_path / "log.h5"), str(tmp_path / "t.json")]) == 0
    json.loads((tmp_path / "t.json").read_text())


@pytest.mark.parametrize("table", ["steps", "trace"])
def test_times_that_nobody_knows(tmp_path: Path, table: str) -> None:
    def unknown(file: h5py.File) -> None:
        rows = file[table][()]
        for column in rows.dtype.names:
            if rows.dtype[column].kind == "f":
                rows[column][: len(rows) // 2] = np.nan
        file[table][...] = rows

    path = changed(tmp_path, unknown)
    assert main(["report", str(path)]) == 0
    assert main(["trace", str(path), str(tmp_path / "t.json")]) == 0
    assert "NaN" not in (tmp_path / "t.json").read_text()


def test_a_mangled_log_is_a_log_or_a_sentence(tmp_path: Path) -> None:
    write_log(tmp_path / "sound.h5")
    sound, ends = (tmp_path / "sound.h5").read_bytes(), set()
    for seed in range(150):
        draw = random.Random(seed)
        data = bytearray(sound)
        for _ in range(draw.randrange(4)):
            place = draw.randrange(len(data))
            data[place : place + draw.randrange(1, 9)] = draw.randbytes(draw.randrange(1, 9))
        if draw.random() < 0.2:
            del data[draw.randrange(len(data)) :]
        (tmp_path / "log.h5").write_bytes(data)
        ends.add(main(["trace", str(tmp_path / "log.h5"), str(tmp_path / "t.json")]))
    assert ends == {0, 2}


def test_a_damaged_log_that_was_never_closed(tmp_path: Path) -> None:
    """HDF5 itself would look at it again and again, for ever."""
    path = tmp_path / "log.h5"
    writer = write_log(path, closed=False)
    assert is_followed(path)
    data = bytearray(path.read_bytes())
    (tmp_path / "left.h5").write_bytes(data)
    with open_log(tmp_path / "left.h5") as file:
        assert len(file["trace"]) == 18
    for place in (at for at in range(48, len(data) - 4) if data[at : at + 4] in (b"EAHD", b"EAIB", b"OHDR", b"EADB")):
        (tmp_path / "left.h5").write_bytes(data[: place + 6] + bytes([data[place + 6] ^ 255]) + data[place + 7 :])
        with pytest.raises(UserError, match=r"a damaged log|not a readable"):
            open_log(tmp_path / "left.h5")
    writer.close()
    with open_followed(path) as file:
        assert len(file["steps"]) == 3


def test_outputs_do_not_replace_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "log.h5")
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    assert main(["trace", str(tmp_path / "log.h5"), str(pipe)]) == 2
    assert "something else than a file" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "report.html")
    assert main(["report", str(tmp_path / "log.h5"), "--out", str(tmp_path / "out")]) == 2
    assert pipe.is_fifo()


# -- the latency database ----------------------------------------------------------------------------------------------

KEY = device_key({"host": "edge1"})


def model() -> Outline:
    return outline(as_chain([nn.Linear(4, 4) for _ in range(3)]), 0, (torch.zeros(5, 4),))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("database") / "latency.h5"
    row = (0.5, 0.25, 0.125)
    remember(path, model(), {KEY: ({"host": "edge1"}, LayerTimes(row, row, row, row, 1.0, ((0, 2, 0.5, 0.5),), 1.25))})
    keep_predictor(path, Predictor.train(library(path), steps=1))
    return path.read_bytes()


def all_known(path: Path) -> bool:
    """Whether anything is; everything that reads a database and writes it is done."""
    found = [recall(path, model(), [KEY])[0], *library(path), recall_predictor(path)]
    row = (1.0, 1.0, 1.0)
    remember(path, model(), {"new": ({}, LayerTimes(row, row, row, row, 1.0, ((0, 3, 1.0, 1.0),), 1.0))})
    return any(one is not None for one in found)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.__setitem__(model().key + "x", h5py.ExternalLink("/nowhere.h5", "/x")),
        lambda f: (f.__delitem__(model().key), f.__setitem__(model().key, h5py.SoftLink("/predictor"))),
        lambda f: (f.__delitem__(model().key), f.__setitem__(model().key, 3.0)),
        lambda f: f[f"{model().key}/{KEY}"].attrs.__setitem__("stretch", "wide"),
        lambda f: f[f"{model().key}/{KEY}"].attrs.__setitem__("stretch", np.nan),
        lambda f: instead(f"{model().key}/{KEY}/pieces", data=np.array([[2.0, 9.0, 1.0, 1.0]]))(f),
        lambda f: instead(f"{model().key}/{KEY}/times", data=np.full((4, 3), np.inf))(f),
        lambda f: instead(f"{model().key}/outline", data=np.frombuffer(b"[" * 9999, np.uint8))(f),
        lambda f: instead("predictor/data/00000/probes", shape=(10**12, 2), dtype="i8", chunks=(64, 2))(f),
        lambda f: f["predictor/data/00000"].attrs.__setitem__("model", "another"),
        lambda f: f.attrs.__setitem__("format", np.array([1, 2])),
    ],
)
def test_what_a_database_cannot_hold_is_not_known(
    tmp_path: Path, database: bytes, change: Callable[[h5py.File], Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "latency.h5"
    path.write_bytes(database)
    with h5py.File(path, "r+") as file:
        change(file)
    all_known(path)
    assert "cannot be read" in caplog.text
    assert recall(path, model(), ["new"])[0] is not None
    assert "Traceback" not in caplog.text


def test_a_mangled_database_is_read_or_set_aside(tmp_path: Path, database: bytes) -> None:
    ends = set()
    for seed in range(60):
        draw = random.Random(seed)
        data = bytearray(database)
        for _ in range(draw.randrange(3)):
            place = draw.randrange(len(data))
            data[place : place + 4] = draw.randbytes(4)
        if draw.random() < 0.2:
            del data[draw.randrange(len(data)) :]
        path = tmp_path / f"{seed}.h5"
        path.write_bytes(data)
        ends.add(all_known(path))
    assert ends == {True, False}


def test_a_database_that_is_no_file_stays_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert not all_known(path)
    assert path.is_fifo()
    assert "is no file" in caplog.text
    os.mkfifo(tmp_path / "other.lock")
    assert not all_known(tmp_path / "other")
    with pytest.raises(UserError, match=r"pipeline\.latency_db: ~nobody-of-this-name/x"):
        database_path("~nobody-of-this-name/x")


# -- fleets and caches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a = " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b"[[hosts]]\nname = 'a'\ncpu = nan", "expected a finite number"),
        (b"[[hosts]]\nname = 'a'\ncount = 4096\n[[hosts]]\nname = 'b'", "at most 4096"),
        (b"[[hosts]]\nname = 'a'\nthreads = 99999999999", "threads at most 1024"),
        (b"[[hosts]]\nname = 'a'\nmemory = '" + b"9" * 400 + b"G'", "expected e.g."),
        (b"[[hosts]]\nname = 'a'\nlink = 0x" + b"f" * 5000, "at most 64 bits"),
        (b"\xff\xfe", "not valid TOML"),
        (b"#" * (2 << 20), "more than the 1048576"),
    ],
)
def test_what_is_no_fleet_is_a_sentence(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_bytes(text)
    with pytest.raises(UserError, match=message):
        read_fleet(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="a device or a pipe"):
        read_fleet(path)


def test_machine_code_that_others_may_have_written(tmp_path: Path) -> None:
    own = tmp_path / "cache" / "kernels"
    own.mkdir(parents=True, mode=0o700)
    (own / "one.nbc").write_bytes(b"")
    assert foreign(own) == ""
    for path, mode in ((own, 0o777), (own.parent, 0o777), (own / "one.nbc", 0o666)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert f"others can write {path}" in foreign(own)
        path.chmod(before)
    own.parent.chmod(0o1777)  # as /tmp: there nobody takes another's folder away
    assert foreign(own) == ""
    (own / "two.nbc").symlink_to(own / "one.nbc")
    assert "two.nbc" in foreign(own)
    with pytest.raises(OSError, match=r"two\.nbc"):
        open_lock(own / "two.nbc")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_machine_code_of_another_user(tmp_path: Path) -> None:
    own = tmp_path / "kernels"
    own.mkdir(mode=0o700)
    (own / "one.nbc").write_bytes(b"")
    os.chown(own / "one.nbc", 12345, 12345)
    assert "another user's" in foreign(own)
