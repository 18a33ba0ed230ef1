"""The command line ``lab``."""

import argparse
import os
import signal
import sys
from pathlib import Path

from accept_mpi.device.fleet import Host, read
from accept_mpi.errors import UserError
from edgelab import LabError
from edgelab.laboratory import Laboratory, crowded, keep, labs


def main() -> int:
    """Parse the command line and run its command; returns the exit code."""
    if sys.argv[1:2] == ["_keep"]:
        return keep(sys.argv[2], sys.stdin.buffer)
    options = _parser().parse_args()
    try:
        code = int(options.command(options) or 0)
        sys.stdout.flush()
    except UserError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has closed the pipe, as in "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab", description="Several unequal hosts on slow links in this one machine.")
    parser.add_argument("--name", help="of the lab (default: $ACCEPT_LAB, or the only one that is up)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="make the hosts of a fleet")
    up.add_argument("fleet", type=Path, metavar="FLEET.toml")
    up.set_defaults(command=_up)

    run = commands.add_parser("run", help="run a command beside the hosts; its mpirun starts ranks on them")
    run.add_argument("--fleet", type=Path, metavar="FLEET.toml", help="in a lab made for this command and removed after it")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    run.set_defaults(command=_run)

    execute = commands.add_parser("exec", help="run a command on one host")
    execute.add_argument("host")
    execute.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    execute.set_defaults(command=_exec)

    change = commands.add_parser("set", help="change a host while it runs: cpu=0.2 link=5 (link=free: unlimited)")
    change.add_argument("host")
    change.add_argument("settings", nargs="+", metavar="KEY=VALUE")
    change.set_defaults(command=_set)

    for name, text in (
        ("kill", "power a host off: cable silent, all its processes gone"),
        ("cut", "pull a host's cable"),
        ("mend", "plug a host's cable in again"),
    ):
        verb = commands.add_parser(name, help=text)
        verb.add_argument("host")
        verb.set_defaults(command=lambda options, name=name: getattr(_lab(options), name)(options.host))

    status = commands.add_parser("status", help="the hosts and what runs on them")
    status.set_defaults(command=_status)
    down = commands.add_parser("down", help="end everything that runs in the lab, and the lab")
    down.set_defaults(command=lambda options: _lab(options).down())
    return parser


def _lab(options: argparse.Namespace) -> Laboratory:
    """The lab that the command is for. Raises LabError if it is not up, or it is unclear which one is meant."""
    name = options.name or os.environ.get("ACCEPT_LAB")
    if name is None:
        there = labs()
        if len(there) != 1:
            raise LabError(f"several labs are up ({', '.join(there)}): say which by --name" if there else "no lab is up")
        name = there[0]
    lab = Laboratory(name)
    lab.state()
    return lab


def _new(options: argparse.Namespace, fleet: Path) -> tuple[Laboratory, list[Host]]:
    hosts = read(fleet)
    warning = crowded(hosts)
    if warning:
        print(f"lab: {warning}", file=sys.stderr)
    return Laboratory(options.name or os.environ.get("ACCEPT_LAB") or fleet.stem.replace("_", "-").lower()), hosts


def _up(options: argparse.Namespace) -> int:
    lab, hosts = _new(options, options.fleet)
    lab.up(hosts)
    return _show(lab)


def _run(options: argparse.Namespace) -> int:
    words = _words(options)
    if options.fleet is None:
        return _wait(_lab(options), words)
    lab, hosts = _new(options, options.fleet)
    with lab.using(hosts):
        return _wait(lab, words)


def _wait(lab: Laboratory, words: list[str]) -> int:
    """Run a command; returns its exit code. The first Ctrl-C is left to the command itself; a second one kills it and all
    that it started."""
    with lab.start(words) as running:
        for _ in range(2):
            try:
                return running.process.wait()
            except KeyboardInterrupt:
                continue
        return 128 + signal.SIGINT


def _exec(options: argparse.Namespace) -> int:
    lab = _lab(options)
    command = lab.on(options.host, _words(options))
    os.execve(command[0], command, os.environ | lab.environment())


def _words(options: argparse.Namespace) -> list[str]:
    words: list[str] = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise LabError("no command was given")
    return words


def _set(options: argparse.Namespace) -> int:
    lab = _lab(options)
    print(_line(lab, lab.set(options.host, *options.settings)))
    return 0


def _status(options: argparse.Namespace) -> int:
    names = labs() if options.name is None else [_lab(options).name]
    if not names:
        print("no lab is up")
    for name in names:
        _show(Laboratory(name))
    return 0


def _show(lab: Laboratory) -> int:
    print(f'lab "{lab.name}", mpirun -hostfile {lab.hostfile}')
    print(f"{'host':14} {'address':15} {'cpu':>5} {'cores':>6} {'isa':>8} {'memory':>7} {'link':>11}  state")
    for host in lab.hosts:
        print(_line(lab, host))
    return 0


def _line(lab: Laboratory, host: Host) -> str:
    place, running = lab.place(host.name), len(lab.processes(host.name))
    cores = ",".join(map(str, lab.state()["cores"][host.name]))
    memory = f"{host.memory / (1 << 30):.1f} G" if host.memory else "-"
    link = f"{host.link:g} Mbit/s" if host.link else "free"
    state = f"{running} process{'' if running == 1 else 'es'}" if lab.network.plugged(place) else "cut off"
    address = lab.network.address(place)
    return f"{host.name:14} {address:15} {host.cpu:5.2f} {cores:>6} {host.isa or '-':>8} {memory:>7} {link:>11}  {state}"
