"""The command line ``accept-mpi COMMAND`` or ``python -m accept_mpi COMMAND``. Each command has a function here; what it
takes is in ``cli.options``."""

import argparse
import contextlib
import faulthandler
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from accept_mpi.cli import options
from accept_mpi.cli.terminal import last_words, outlive_terminal, printing
from accept_mpi.device.openmp import wait_briefly
from accept_mpi.errors import INTERRUPTED, UserError, counted, one_line
from accept_mpi.launch.stop_signals import end_by_signals, keep_handlers
from accept_mpi.version import __version__

_START, _LONGEST_START = "ACCEPT_MPI_START_SECONDS", 1e9


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(UserError.exit_code, f"accept_mpi: {one_line(message)}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (2 for a mistake that the user can fix, 1 for a failed run)."""
    _prepare_streams()
    home = os.path.expanduser("~")  # "~" for a user that the system does not know
    os.environ.setdefault("HOME", home if home != "~" else "/")  # Open MPI does not start without one, as services may be
    wait_briefly()
    given = _parser().parse_args(arguments)
    try:
        _check_directory()
        with printing():
            code: int = given.command(given)
            sys.stdout.flush()
    except UserError as error:
        last_words(f"accept_mpi: {error}\n")
        return error.exit_code
    except BrokenPipeError:  # the reader has closed the pipe, as in "| head"
        last_words("")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _check_directory() -> None:
    """Raise UserError if the current directory is gone: torch's libraries then end the process without saying why."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(f"the current directory: {error.strerror}; it has been removed, so change to another one") from None


def _prepare_streams() -> None:
    """Make standard output and error exist, and accept all texts, such as paths that are not UTF-8."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open as long as the process)
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="accept_mpi", description="Train one neural network on a few unequal machines.")
    parser.add_argument("--version", action="version", version=f"accept_mpi {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, arguments, command, text in (
        ("train", options.train, _train, "train as a job file says (under mpirun, or alone)"),
        ("launch", options.launch, _launch, "train under a supervisor: lost hosts are dropped, the run goes on"),
        ("export", options.export, _export, "a checkpoint's weights as one .safetensors (or .pt, .pth) file"),
        ("trace", options.trace, _trace, "a log's trace for Chrome or Perfetto"),
        ("tensorboard", options.tensorboard, _tensorboard, "a log's curves as TensorBoard's event files"),
        ("predict", options.predict, _predict, "what a trained model says of images, or of the test set, as CSV"),
        ("report", options.report, _report, "timeline, loss curve and facts of a log as PNG and HTML"),
        ("watch", options.watch, _watch, "a run while it trains, as a page at 127.0.0.1 or on the terminal"),
        ("plan", options.plan, _plan, "what cuts, devices and links would do, without a cluster"),
        ("doctor", options.nothing, _doctor, "under mpirun: what the hosts are, how fast their links"),
    ):
        _add(commands, name, arguments, command, text)
    benches = commands.add_parser("bench", help="measure").add_subparsers(required=True, metavar="WHAT")
    for name, arguments, command, text in (
        ("single", options.bench_single, _bench_single, "one rank against a plain PyTorch loop of the same arithmetic"),
        ("codec", options.bench_codec, _bench_codec, "codecs: speed against memcpy, bits a value, error"),
        ("partition", options.bench_partition, _bench_partition, "the partitioner: its time over layers and devices"),
    ):
        _add(benches, name, arguments, command, text)
    return parser


def _add(
    commands: Any,
    name: str,
    arguments: Callable[[argparse.ArgumentParser], None],
    command: Callable[[argparse.Namespace], int],
    text: str,
) -> None:
    """Add a command, which takes these ``arguments``, to the others; ``text`` is its line in their help."""
    parser = commands.add_parser(name, help=text)
    arguments(parser)
    parser.set_defaults(command=command)


def _tensorboard(given: argparse.Namespace) -> int:
    from accept_mpi.logs.tensorboard import export_tensorboard

    print(f"{given.out}: {counted(export_tensorboard(given.log, given.out), 'value')}")
    return 0


def _predict(given: argparse.Namespace) -> int:
    from accept_mpi.cli.predict import predict

    rows = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints
        return predict(_source(given), given.folder, given.ema, given.top, rows)


def _watch(given: argparse.Namespace) -> int:
    from accept_mpi.cli.watch import on_terminal, serve

    return on_terminal(given.log) if given.terminal else serve(given.log, given.port)


def _plan(given: argparse.Namespace) -> int:
    from accept_mpi.cli.plan import main

    return main(given)


def _train(given: argparse.Namespace) -> int:
    # MPI starts when it is imported. It then blocks the interpreter until all ranks are there, and would wait for ever for
    # one that died before.
    outlive_terminal()
    end_by_signals()
    faulthandler.dump_traceback_later(_start_seconds(), exit=True)
    with keep_handlers():
        from accept_mpi.comm import runtime  # noqa: F401  # starts MPI

    faulthandler.cancel_dump_traceback_later()
    from accept_mpi.cli.train import main

    return main(given)


def _start_seconds() -> float:
    given = os.environ.get(_START, "300")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_START:
        raise UserError(f'{_START} = "{given}": expected seconds, such as 300')
    return seconds


def _launch(given: argparse.Namespace) -> int:
    from accept_mpi.launch.supervisor import Request, Supervisor

    outlive_terminal()
    return Supervisor(
        Request(given.job, tuple(given.set), given.hostfile, given.ranks, given.restarts, given.stall, given.resume)
    ).run()


def _export(given: argparse.Namespace) -> int:
    from accept_mpi.cli.export import export

    return export(_source(given), given.out, given.ema, given.merge)


def _source(given: argparse.Namespace) -> Path:
    """The checkpoint or run that is named, or the run's best checkpoint."""
    from accept_mpi.recovery.checkpoint import best_of

    checkpoint: Path = given.checkpoint
    return best_of(checkpoint) if given.best else checkpoint


def _trace(given: argparse.Namespace) -> int:
    from accept_mpi.logs.chrome_trace import export_chrome

    if not given.out.name:
        raise UserError(f"{given.out}: expected a file name such as trace.json")
    export_chrome(given.log, given.out)
    print(f"{given.out}: open it in ui.perfetto.dev or chrome://tracing")
    return 0


def _report(given: argparse.Namespace) -> int:
    from accept_mpi.logs.html_report import write_report

    for path in write_report(given.log, given.out):
        print(path)
    return 0


def _doctor(given: argparse.Namespace) -> int:
    from accept_mpi.cli.doctor import main

    outlive_terminal(full=False)
    return main(given)


def _bench_single(given: argparse.Namespace) -> int:
    from accept_mpi.cli.bench_single import main

    return main(given)


def _bench_partition(given: argparse.Namespace) -> int:
    from accept_mpi.cli.bench_partition import main

    return main(given)


def _bench_codec(given: argparse.Namespace) -> int:
    from accept_mpi.cli.bench_codec import main

    return main(given)
