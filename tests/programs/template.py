"""Forks the ranks of tests: a process that has imported the libraries which every rank needs.

Importing torch takes seconds of CPU on a small machine, and a test that starts three ranks would wait for that three
times. So mpirun starts ``tests/programs/rank.py``, which asks this process to fork a rank, with its arguments, environment,
working directory, processor cores and open files. Whatever runs there is a process of its own: it imports accept_mpi and MPI
itself, may be killed or kill itself, and its output, signals and exit status are those of the process that mpirun has
started. Three things differ from a fresh interpreter: libraries are there already, all ranks order sets of strings alike,
and at the end modules are not taken apart.

``python template.py FOLDER`` listens in FOLDER/socket, and ends when its standard input does, with everything it has forked.
"""

import atexit
import contextlib
import ctypes
import gc
import marshal
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

LIBRARIES = (
    "numpy", "torch", "torch.func", "torch.utils.checkpoint", "h5py", "msgspec", "numba", "rich.console", "rich.progress",
    "safetensors.torch", "sklearn.datasets", "xxhash", "unittest", "multiprocessing", "sympy", "tomllib",
)  # fmt: skip
FIXED = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMBA_", "TORCH", "LD_PRELOAD", "MALLOC_", "GLIBC_")
"""Environment variables that interpreter and libraries read as they start: where one differs, nothing is forked."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_REQUEST_SECONDS = 60.0


class Request(NamedTuple):
    """What a rank is."""

    arguments: list[str]
    """Of python: "-m MODULE ...", "-c CODE ..." or "SCRIPT ..."."""
    folder: str
    environment: dict[str, str]
    cores: list[int]


def fixed() -> dict[str, str]:
    """Of this process's environment what a rank cannot have otherwise."""
    return {name: value for name, value in os.environ.items() if name.startswith(FIXED)}


def receive(peer: socket.socket) -> tuple[Request, list[int]]:
    """A request, and its standard input, output and error. Raises OSError where its sender has ended meanwhile."""
    peer.settimeout(_REQUEST_SECONDS)
    head, files, *_ = socket.recv_fds(peer, 4, 3)
    try:
        if len(head) != 4:
            raise OSError("the request is torn")
        size = struct.unpack("<i", head)[0]
        text = b""
        while len(text) < size:
            part = peer.recv(size - len(text))
            if not part:
                raise OSError("the request is torn")
            text += part
    except OSError:
        for file in files:
            os.close(file)
        raise
    return Request(*marshal.loads(text)), files


def become(request: Request, files: list[int]) -> None:
    """In the forked process: everything that a rank has of its own, and a name for ``ps``, "rank 2"."""
    name = f"rank {request.environment.get('OMPI_COMM_WORLD_RANK', 'alone')}"
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # The template's own streams believe that they are files.
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    os.sched_setaffinity(0, request.cores)
    sys.modules["numpy"].random.seed()  # as a process has it that has just begun; Python's own does so by itself
    random.seed()


def serve(listener: socket.socket) -> Request | None:
    """Fork as asked, until standard input ends (None). Returns in the forked processes, too, with what they are to run."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    ends, wakes = socket.socketpair()
    ends.setblocking(False)
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    selector.register(ends, selectors.EVENT_READ)
    forked: dict[socket.socket, int] = {}
    while True:
        for key, _ in selector.select():
            peer: Any = key.fileobj
            if peer is sys.stdin:
                if not os.read(0, 1):
                    return None
            elif peer is ends:
                ends.recv(4096)
                for one, pid in list(forked.items()):
                    if (end := os.waitpid(pid, os.WNOHANG))[0]:
                        with contextlib.suppress(OSError):  # nobody may ask any more
                            one.sendall(struct.pack("<i", end[1]))
                        with contextlib.suppress(KeyError):
                            selector.unregister(one)
                        one.close()
                        del forked[one]
            elif peer is listener:
                one, _ = listener.accept()
                try:
                    request, files = receive(one)
                except OSError:
                    one.close()
                    continue
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    for other in (listener, ends, wakes, one, *forked):
                        other.close()
                    become(request, files)
                    return request
                for file in files:
                    os.close(file)
                one.setblocking(False)
                forked[one] = pid
                selector.register(one, selectors.EVENT_READ)
            elif peer in forked:  # a signal to pass on, or it is dead, and what it stands for is to die with it
                try:
                    signals = peer.recv(64)
                except BlockingIOError:
                    continue
                except OSError:
                    signals = b""
                for number in signals or bytes([signal.SIGKILL]):
                    os.kill(forked[peer], number)
                if not signals:
                    selector.unregister(peer)


def run(arguments: list[str]) -> None:
    """What ``python *arguments`` does."""
    what, *rest = arguments
    if what == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(what).resolve().parent))
        sys.argv = arguments
        runpy.run_path(what, run_name="__main__")


def finish(arguments: list[str]) -> NoReturn:
    """Run them and end as the interpreter does, but for taking all libraries apart, which takes half a second."""
    code = 0
    try:
        run(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def main() -> Request | None:
    """What this process is to run, where it is a forked one."""
    folder = Path(sys.argv[1])
    for name in LIBRARIES:
        __import__(name)
    sys.modules["torch"].set_num_threads(1)
    sys.modules["numba"].njit("f8(f8[:])")(lambda x: x[0])  # its compiler makes itself ready as it is first used
    sys.pycache_prefix, sys.dont_write_bytecode = (
        str(folder / "compiled"),
        False,
    )  # accept_mpi is read by each, compiled once
    gc.collect()
    gc.freeze()
    (folder / "fixed").write_bytes(marshal.dumps((FIXED, fixed())))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket.new"))
    listener.listen(64)
    (folder / "socket.new").rename(folder / "socket")
    return serve(listener)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    this = main()
    if this:
        finish(this.arguments)
    shutil.rmtree(sys.argv[1])
