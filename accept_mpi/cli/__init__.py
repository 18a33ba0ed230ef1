"""The command line ``accept-mpi COMMAND`` or ``python -m accept_mpi COMMAND``. Each command has a function here."""

import argparse
import contextlib
import faulthandler
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from accept_mpi.cli.arguments import byte_size, duration, link_speed, nonnegative_integer, port_number, positive_integer
from accept_mpi.cli.terminal import last_words, outlive_terminal, printing
from accept_mpi.errors import INTERRUPTED, UserError, counted, one_line
from accept_mpi.launch.run_identity import RunIdentity
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
    options = _parser().parse_args(arguments)
    try:
        with printing():
            code: int = options.command(options)
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

    train = commands.add_parser("train", help="train as a job file says (under mpirun, or alone)")
    train.add_argument("job", type=Path, metavar="JOB.toml")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key, e.g. train.lr=0.01")
    train.add_argument("--resume", type=Path, metavar="DIR", help="go on from a checkpoint, or a run's newest one")
    train.add_argument("--quiet", action="store_true", help="no progress")
    train.add_argument("--run", type=RunIdentity.parse, help=argparse.SUPPRESS)  # given by ``launch``
    train.set_defaults(command=_train)

    launch = commands.add_parser("launch", help="train under a supervisor: lost hosts are dropped, the run goes on")
    launch.add_argument("job", type=Path, metavar="JOB.toml")
    where = launch.add_mutually_exclusive_group(required=True)
    where.add_argument("-hostfile", "--hostfile", type=Path, metavar="FILE", help="hosts, one a line, as for mpirun")
    where.add_argument("-n", "--ranks", type=positive_integer, metavar="N", help="ranks on this machine")
    launch.add_argument("--restarts", type=nonnegative_integer, default=20, help="how often to begin again (default 20)")
    launch.add_argument("--stall", type=duration, default=900.0, metavar="S", help="seconds without a step that end a start")
    launch.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the job")
    launch.add_argument("--resume", type=Path, metavar="DIR", help="begin from a checkpoint, or a run's newest one")
    launch.set_defaults(command=_launch)

    export = commands.add_parser("export", help="a checkpoint's weights as one .safetensors (or .pt, .pth) file")
    export.add_argument("checkpoint", type=Path)
    export.add_argument("out", type=Path, metavar="OUT.safetensors")
    export.add_argument("--best", action="store_true", help="the run's best checkpoint (output.keep_best)")
    export.add_argument("--ema", action="store_true", help="with the moving averages of the weights (train.ema)")
    export.add_argument("--merge", action="store_true", help="with adapters added to the weights (train.lora)")
    export.set_defaults(command=_export)

    trace = commands.add_parser("trace", help="a log's trace for Chrome or Perfetto")
    trace.add_argument("log", type=Path, metavar="LOG.h5", help="a log, or a run's directory")
    trace.add_argument("out", type=Path, metavar="OUT.json")
    trace.set_defaults(command=_trace)

    board = commands.add_parser("tensorboard", help="a log's curves as TensorBoard's event files")
    board.add_argument("log", type=Path, metavar="LOG.h5", help="a log, or a run's directory")
    board.add_argument("out", type=Path, metavar="DIR")
    board.set_defaults(command=_tensorboard)

    predict = commands.add_parser("predict", help="what a trained model says of images, or of the test set, as CSV")
    predict.add_argument("checkpoint", type=Path, help="a run's directory, or a checkpoint")
    predict.add_argument("folder", type=Path, nargs="?", help="images (default: the test set)")
    predict.add_argument("--best", action="store_true", help="the run's best checkpoint (output.keep_best)")
    predict.add_argument("--ema", action="store_true", help="with the moving averages of the weights (train.ema)")
    predict.add_argument("--top", type=positive_integer, default=1, help="most likely classes to show (default 1)")
    predict.set_defaults(command=_predict)

    report = commands.add_parser("report", help="timeline, loss curve and facts of a log as PNG and HTML")
    report.add_argument("log", type=Path, metavar="LOG.h5", help="a log, or a run's directory")
    report.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: beside the log)")
    report.set_defaults(command=_report)

    watch = commands.add_parser("watch", help="a run while it trains, as a page at 127.0.0.1 or on the terminal")
    watch.add_argument("log", type=Path, metavar="LOG.h5", help="a log, or a run's directory")
    watch.add_argument("--port", type=port_number, default=8520, help="of the page (default 8520; 0: any)")
    watch.add_argument("--terminal", action="store_true", help="show it here")
    watch.set_defaults(command=_watch)

    plan = commands.add_parser("plan", help="what cuts, devices and links would do, without a cluster")
    plan.add_argument("job", type=Path, metavar="JOB.toml")
    source = plan.add_mutually_exclusive_group()
    source.add_argument("--log", type=Path, metavar="LOG.h5", help="devices and links as a run measured them")
    source.add_argument("--fleet", type=Path, metavar="FLEET.toml", help="devices on paper, timed on this machine")
    plan.add_argument("--add", action="append", default=[], metavar="PERSONA[:N]", help="more devices, e.g. pi5:2")
    plan.add_argument(
        "--link", type=link_speed, action="append", default=[], metavar="HOST=MBIT", help="another link, e.g. edge2=10"
    )
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the job")
    plan.add_argument("--timeline", type=Path, metavar="OUT.png", help="draw some steps")
    plan.add_argument("--lanes", action="store_true", help="what computing several actions at a time would give")
    plan.add_argument("--json", action="store_true", help="for machines")
    plan.set_defaults(command=_plan)

    doctor = commands.add_parser("doctor", help="under mpirun: what the hosts are, how fast their links")
    doctor.set_defaults(command=_doctor)

    bench = commands.add_parser("bench", help="measure").add_subparsers(required=True, metavar="WHAT")
    single = bench.add_parser("single", help="one rank against a plain PyTorch loop of the same arithmetic")
    single.add_argument("--model", default="mobilenetv2")
    single.add_argument("--steps", type=positive_integer, default=4, help="steps a measurement (default 4)")
    single.add_argument("--repeats", type=positive_integer, default=5, help="measurements of each, in turn (default 5)")
    single.set_defaults(command=_bench_single)
    codec = bench.add_parser("codec", help="codecs: speed against memcpy, bits a value, error")
    codec.add_argument("codecs", nargs="*", metavar="CODEC", help="e.g. uniform:4/256+sr (default: a selection)")
    codec.add_argument(
        "--sizes", type=byte_size, nargs="+", metavar="SIZE", help="of float32 input, e.g. 64K or 16M (default 4K to 64M)"
    )
    codec.add_argument("--repeats", type=positive_integer, default=20)
    codec.add_argument("--json", action="store_true", help="for machines")
    codec.set_defaults(command=_bench_codec)
    partition = bench.add_parser("partition", help="the partitioner: its time over layers and devices")
    partition.add_argument("--repeats", type=positive_integer, default=1, help="of each; the fastest counts (default 1)")
    partition.add_argument("--json", action="store_true", help="for machines")
    partition.set_defaults(command=_bench_partition)
    return parser


def _tensorboard(options: argparse.Namespace) -> int:
    from accept_mpi.logs.tensorboard import export_tensorboard

    print(f"{options.out}: {counted(export_tensorboard(options.log, options.out), 'value')}")
    return 0


def _predict(options: argparse.Namespace) -> int:
    from accept_mpi.cli.predict import predict

    rows = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints
        return predict(_source(options), options.folder, options.ema, options.top, rows)


def _watch(options: argparse.Namespace) -> int:
    from accept_mpi.cli.watch import on_terminal, serve

    return on_terminal(options.log) if options.terminal else serve(options.log, options.port)


def _plan(options: argparse.Namespace) -> int:
    from accept_mpi.cli.plan import main

    return main(options)


def _train(options: argparse.Namespace) -> int:
    # MPI starts when it is imported. It then blocks the interpreter until all ranks are there, and would wait for ever for
    # one that died before.
    outlive_terminal()
    end_by_signals()
    faulthandler.dump_traceback_later(_start_seconds(), exit=True)
    with keep_handlers():
        from accept_mpi.comm import runtime  # noqa: F401  # starts MPI

    faulthandler.cancel_dump_traceback_later()
    from accept_mpi.cli.train import main

    return main(options)


def _start_seconds() -> float:
    given = os.environ.get(_START, "300")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_START:
        raise UserError(f'{_START} = "{given}": expected seconds, such as 300')
    return seconds


def _launch(options: argparse.Namespace) -> int:
    from accept_mpi.launch.supervisor import Request, Supervisor

    outlive_terminal()
    return Supervisor(
        Request(
            options.job, tuple(options.set), options.hostfile, options.ranks, options.restarts, options.stall, options.resume
        )
    ).run()


def _export(options: argparse.Namespace) -> int:
    from accept_mpi.cli.export import export

    return export(_source(options), options.out, options.ema, options.merge)


def _source(options: argparse.Namespace) -> Path:
    """The checkpoint or run that is named, or the run's best checkpoint."""
    from accept_mpi.recovery.checkpoint import best_of

    checkpoint: Path = options.checkpoint
    return best_of(checkpoint) if options.best else checkpoint


def _trace(options: argparse.Namespace) -> int:
    from accept_mpi.logs.chrome_trace import export_chrome

    if not options.out.name:
        raise UserError(f"{options.out}: expected a file name such as trace.json")
    export_chrome(options.log, options.out)
    print(f"{options.out}: open it in ui.perfetto.dev or chrome://tracing")
    return 0


def _report(options: argparse.Namespace) -> int:
    from accept_mpi.logs.html_report import write_report

    for path in write_report(options.log, options.out):
        print(path)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from accept_mpi.cli.doctor import main

    return main(options)


def _bench_single(options: argparse.Namespace) -> int:
    from accept_mpi.cli.bench_single import main

    return main(options)


def _bench_partition(options: argparse.Namespace) -> int:
    from accept_mpi.cli.bench_partition import main

    return main(options)


def _bench_codec(options: argparse.Namespace) -> int:
    from accept_mpi.cli.bench_codec import main

    return main(options)
