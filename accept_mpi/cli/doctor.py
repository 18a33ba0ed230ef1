"""``accept_mpi doctor``: the hosts of a run, their versions, and the speed of the links between them.

It compiles the kernels of a usual run on all hosts, too, so that the first run need not.
"""

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from accept_mpi.cli.terminal import printing
from accept_mpi.codecs.coding import kernels_of
from accept_mpi.comm.links import links
from accept_mpi.comm.machine_code import compile_together
from accept_mpi.comm.runtime import Runtime
from accept_mpi.device.facts import release
from accept_mpi.job import Pipeline
from accept_mpi.logs.progress import on_terminal
from accept_mpi.planning.codec_choice import ladder_of
from accept_mpi.planning.planner import planning_kernels


def main(options: argparse.Namespace) -> int:
    """Measure the links and print the tables on rank 0; ends the process."""
    runtime = Runtime.start()
    try:
        mine = {f"{a}-{b}": values for (a, b), values in links(runtime.world).items()}
        found = runtime.messenger.allgather(mine, runtime.startup_seconds, "the links")
        if runtime.rank == 0:
            merged = {pair: values for part in found for pair, values in part.items()}
            with printing():
                _print(runtime.hosts, merged)
                print(_losses(runtime), flush=True)
        took = runtime.messenger.allgather(_compile(runtime), runtime.startup_seconds, "compiled kernels")
        if runtime.rank == 0:
            print(f"Kernels: compiled, or found in the cache, within {max(took):.1f} s.")
    except BaseException as error:
        runtime.fail(error)
    runtime.finish(0)


def _compile(runtime: Runtime) -> float:
    """Compile the kernels of codecs that "auto" may choose, and on rank 0 those of the planner. Returns the seconds it
    took."""
    planner = planning_kernels(runtime.size) if runtime.rank == 0 else []
    return compile_together(runtime, [*kernels_of(ladder_of(Pipeline()).values()), *planner])


def _losses(runtime: Runtime) -> str:
    """A sentence on what the loss of a rank would do to a run here."""
    if runtime.survives:
        return "A lost rank: the others go on (ULFM)."
    if "Open MPI v5" in runtime.hosts[0]["versions"]["mpi"]:
        return "A lost rank: ends the run; with mpirun --with-ft ulfm the others would go on."
    return (
        "A lost rank: ends the run; this MPI does not survive it. accept_mpi launch begins again from the last checkpoint."
    )


def _print(hosts: list[dict[str, Any]], found: dict[str, tuple[float, float]]) -> None:
    terminal = on_terminal()
    console = Console(width=110, force_terminal=terminal, no_color=not terminal)
    table = Table(title="Hosts", title_justify="left")
    for column in ("rank", "host", "machine", "cores", "memory", "clock offset"):
        table.add_column(column, justify="right" if column in ("rank", "cores", "memory", "clock offset") else "left")
    with_gpus = any(host["gpus"] for host in hosts)
    if with_gpus:
        table.add_column("GPUs (train.device)")
    for host in hosts:
        offset = f"{1e3 * host['clock_offset_s']:+.3f} ms"
        memory = f"{host['memory_bytes'] / 2**30:.1f} GiB"
        seen = [", ".join(host["gpus"])] if with_gpus else []
        table.add_row(str(host["rank"]), host["host"], host["machine"], str(host["cores"]), memory, offset, *seen)
    console.print(table)
    versions = Table(title="Versions", title_justify="left")
    versions.add_column("package")
    for host in hosts:
        versions.add_column(f"rank {host['rank']}")
    disagree = []
    for package in hosts[0]["versions"]:
        row = [host["versions"].get(package, "?") for host in hosts]
        if differ := len(set(map(release, row))) > 1:
            disagree.append(package)
        versions.add_row(package, *row, style="bold red" if differ else None)
    console.print(versions)
    if found:
        console.print(_links(len(hosts), found))
    for package in disagree:
        print(f"WARNING: hosts disagree on the version of {package}")
    if not disagree:
        print("All hosts agree on all versions.")


def _links(size: int, found: dict[str, tuple[float, float]]) -> Table:
    table = Table(title="Links: one-way latency, bandwidth", title_justify="left")
    table.add_column("")
    for rank in range(size):
        table.add_column(f"rank {rank}", justify="right")
    for a in range(size):
        cells = []
        for b in range(size):
            values = found.get(f"{min(a, b)}-{max(a, b)}")
            cells.append(f"{1e6 * values[0]:.0f} us, {_rate(values[1])}" if values and a != b else "")
        table.add_row(f"rank {a}", *cells)
    return table


def _rate(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
