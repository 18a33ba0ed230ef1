"""Mistakes on the command line are one sentence on standard error, with exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import HANGS, ROOT, environment
from safetensors import SafetensorError

from accept_mpi.cli import main
from accept_mpi.device.cpu import set_threads
from accept_mpi.errors import UserError


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command with a mistake says."""
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    found = capsys.readouterr()
    assert (code, found.out) == (2, "")
    assert found.err.count("\n") == 1
    return found.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND; see accept_mpi --help"),
        ("plan j.toml --link foo=x", 'argument --link: expected a host and Mbit/s such as edge2=10, got "foo=x"'),
        ("launch j.toml -n 0", 'argument -n/--ranks: expected a whole number >= 1, got "0"'),
        ("launch j.toml -n -3", 'expected a whole number >= 1, got "-3"'),
        ("launch j.toml -n 2 --stall 0", 'argument --stall: expected seconds > 0, got "0"'),
        ("launch j.toml -n 2 --stall nan", 'expected seconds > 0, got "nan"'),
        ("launch j.toml -n 2 --restarts -1", 'argument --restarts: expected a whole number >= 0, got "-1"'),
        ("bench codec --repeats 0", 'argument --repeats: expected a whole number >= 1, got "0"'),
        ("bench codec --sizes 1", "argument --sizes: expected at least 4 bytes"),
        ("bench codec none", 'bench codec: "none" codes nothing'),
        ("bench partition --repeats 0", 'expected a whole number >= 1, got "0"'),
        ("bench single --steps 0", 'expected a whole number >= 1, got "0"'),
        ("bench single --model foo", '--model: unknown name "foo"'),
        ("export run out.onnx", "out.onnx: expected a file name that ends in .safetensors, .pt or .pth"),
        ("export run .", ".: expected a file name that ends in"),
        ("watch run --port 70000", 'argument --port: expected a port from 1 to 65535, or 0 for any, got "70000"'),
        ("watch run --port x", "expected a port from 1 to 65535, or 0 for any"),
        ("trace log.h5 .", ".: expected a file name such as trace.json"),
    ],
)
def test_one_sentence(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    found = said(capsys, *line.split())
    assert found.startswith("accept_mpi: ")
    assert message in found


class _Checkpoint:
    """Enough of a checkpoint to export."""

    def __init__(self, path: Path, *_: object) -> None:
        self.path = path
        self.manifest = type("Manifest", (), {"step": 3, "model": "cnn"})

    def whole(self, average: bool) -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(2)}

    def remembered(self) -> dict[str, torch.Tensor]:
        return {}


@pytest.mark.parametrize("name", ["no/out.safetensors", "no/out.pt", "folder.safetensors"])
def test_export_that_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert not issubclass(SafetensorError, OSError | RuntimeError)
    (tmp_path / "folder.safetensors").mkdir()
    monkeypatch.setattr("accept_mpi.cli.export.Checkpoint", _Checkpoint)
    assert f"{name}: cannot write: " in said(capsys, "export", "run", str(tmp_path / name))


def test_the_same_weights_are_the_same_file_for_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file began with the number of the process that had written it."""
    monkeypatch.setattr("accept_mpi.cli.export.Checkpoint", _Checkpoint)
    written = []
    for number in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda number=number: number)
        assert main(["export", "run", str(tmp_path / "out.pt")]) == 0
        written.append((tmp_path / "out.pt").read_bytes())
    assert written[0] == written[1]
    assert torch.load(tmp_path / "out.pt").keys() == {"weight"}


NO_ROOM = """
import resource, sys, torch
from accept_mpi.cli.export import _write
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, -1))
try:
    _write(Path(sys.argv[1]), {"weight": torch.zeros(10_000)}, {})
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_no_room_for_weights(tmp_path: Path, name: str) -> None:
    """Of torch's files it said: "[enforce fail at inline_container.cc:672] . unexpected pos 3200 vs 3094"."""
    command = [sys.executable, "-c", NO_ROOM, str(tmp_path / name)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANGS)
    assert (done.stdout, done.stderr) == ("File too large\n", "")


@pytest.mark.parametrize("seconds", ["abc", "0", "nan", "inf", ""])
def test_seconds_to_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    monkeypatch.setenv("ACCEPT_MPI_START_SECONDS", seconds)
    assert f'ACCEPT_MPI_START_SECONDS = "{seconds}": expected seconds' in said(capsys, "train", "no.toml")


@pytest.mark.parametrize(("said", "threads"), [("3,1", 3), (" 3 ", 3), ("³", 2), ("", 2), ("few", 2)])
def test_threads_as_openmp_has_them(monkeypatch: pytest.MonkeyPatch, said: str, threads: int) -> None:
    """A list took all cores, and ³ was a traceback."""
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    before = torch.get_num_threads()
    try:
        assert set_threads("auto", 4, 2) == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", ["0", "100000"])
def test_threads_that_no_machine_has(monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with pytest.raises(UserError, match=f"OMP_NUM_THREADS = {threads}: expected 1 to 1024 threads"):
        set_threads("auto", 2, 1)


@pytest.mark.parametrize(
    "words", [("-m", "accept_mpi", "bench", "codec", "bf16", "--sizes", "4K", "--repeats", "1"), ("jobs/lab/lab", "status")]
)
def test_who_has_seen_enough_is_no_error(words: tuple[str, ...]) -> None:
    """``accept_mpi ... | head -0``."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANGS,
        env=environment(),
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    """torch's libraries end the process there, with "cannot load libtorch_cpu.so" at most."""
    (tmp_path / "gone").mkdir()
    script = 'rmdir "$PWD"; exec "$0" -m accept_mpi plan job.toml --fleet fleet.toml'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable], cwd=tmp_path / "gone", capture_output=True, text=True, timeout=HANGS,
        env=environment(),
    )  # fmt: skip
    said = "accept_mpi: the current directory: No such file or directory; it has been removed, so change to another one\n"
    assert (done.returncode, done.stderr) == (2, said)
