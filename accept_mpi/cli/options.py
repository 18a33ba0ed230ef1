"""What each command takes on the command line: a function for each adds its arguments to the command's parser."""

from argparse import SUPPRESS, ArgumentParser
from pathlib import Path

from accept_mpi.cli.arguments import byte_size, duration, link_speed, nonnegative_integer, port_number, positive_integer
from accept_mpi.launch.run_identity import RunIdentity


def _job(parser: ArgumentParser) -> None:
    parser.add_argument("job", type=Path, metavar="JOB.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key, e.g. train.lr=0.01")


def _resume(parser: ArgumentParser) -> None:
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from a checkpoint, or a run's newest one")


def _log(parser: ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="LOG.h5", help="a log, or a run's directory")


def _weights(parser: ArgumentParser) -> None:
    """Which weights of a run."""
    parser.add_argument("--best", action="store_true", help="the run's best checkpoint (output.keep_best)")
    parser.add_argument("--ema", action="store_true", help="with the moving averages of the weights (train.ema)")


def _json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")


def nothing(parser: ArgumentParser) -> None:
    """No arguments."""


def train(parser: ArgumentParser) -> None:
    """A job, and where it begins."""
    _job(parser)
    _resume(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--run", type=RunIdentity.parse, help=SUPPRESS)  # given by ``launch``


def launch(parser: ArgumentParser) -> None:
    """A job, and where it runs."""
    _job(parser)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("-hostfile", "--hostfile", type=Path, metavar="FILE", help="hosts, one a line, as for mpirun")
    where.add_argument("-n", "--ranks", type=positive_integer, metavar="N", help="ranks on this machine")
    parser.add_argument("--restarts", type=nonnegative_integer, default=20, help="how often to begin again (default 20)")
    parser.add_argument("--stall", type=duration, default=900.0, metavar="S", help="seconds without a step that end a start")
    _resume(parser)


def export(parser: ArgumentParser) -> None:
    """A checkpoint, and where its weights go."""
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, metavar="OUT.safetensors")
    _weights(parser)
    parser.add_argument("--merge", action="store_true", help="with adapters added to the weights (train.lora)")


def trace(parser: ArgumentParser) -> None:
    """A log, and where its trace goes."""
    _log(parser)
    parser.add_argument("out", type=Path, metavar="OUT.json")


def tensorboard(parser: ArgumentParser) -> None:
    """A log, and where its curves go."""
    _log(parser)
    parser.add_argument("out", type=Path, metavar="DIR")


def predict(parser: ArgumentParser) -> None:
    """A checkpoint, and what it is asked about."""
    parser.add_argument("checkpoint", type=Path, help="a run's directory, or a checkpoint")
    parser.add_argument("folder", type=Path, nargs="?", help="images (default: the test set)")
    _weights(parser)
    parser.add_argument("--top", type=positive_integer, default=1, help="most likely classes to show (default 1)")


def report(parser: ArgumentParser) -> None:
    """A log, and where its report goes."""
    _log(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: beside the log)")


def watch(parser: ArgumentParser) -> None:
    """A log, and where it is shown."""
    _log(parser)
    parser.add_argument("--port", type=port_number, default=8520, help="of the page (default 8520; 0: any)")
    parser.add_argument("--terminal", action="store_true", help="show it here")


def plan(parser: ArgumentParser) -> None:
    """A job, and the devices that it is planned for."""
    _job(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--log", type=Path, metavar="LOG.h5", help="devices and links as a run measured them")
    source.add_argument("--fleet", type=Path, metavar="FLEET.toml", help="devices on paper, timed on this machine")
    parser.add_argument("--add", action="append", default=[], metavar="PERSONA[:N]", help="more devices, e.g. pi5:2")
    parser.add_argument(
        "--link", type=link_speed, action="append", default=[], metavar="HOST=MBIT", help="another link, e.g. edge2=10"
    )
    parser.add_argument("--timeline", type=Path, metavar="OUT.png", help="draw some steps")
    parser.add_argument("--lanes", action="store_true", help="what computing several actions at a time would give")
    _json(parser)


def bench_single(parser: ArgumentParser) -> None:
    """A model, and how long it is measured."""
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--steps", type=positive_integer, default=4, help="steps a measurement (default 4)")
    parser.add_argument("--repeats", type=positive_integer, default=5, help="measurements of each, in turn (default 5)")


def bench_codec(parser: ArgumentParser) -> None:
    """Codecs, and the arrays that they code."""
    parser.add_argument("codecs", nargs="*", metavar="CODEC", help="e.g. uniform:4/256+sr (default: a selection)")
    parser.add_argument(
        "--sizes", type=byte_size, nargs="+", metavar="SIZE", help="of float32 input, e.g. 64K or 16M (default 4K to 64M)"
    )
    parser.add_argument("--repeats", type=positive_integer, default=20)
    _json(parser)


def bench_partition(parser: ArgumentParser) -> None:
    """How often each problem is solved."""
    parser.add_argument("--repeats", type=positive_integer, default=1, help="of each; the fastest counts (default 1)")
    _json(parser)
