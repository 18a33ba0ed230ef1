"""A host with little memory among others: the plan that holds it, the plan without the limit, and what both really take."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from accept_mpi.device.fleet import Host
from accept_mpi.logs.reader import open_log
from accept_mpi.plan import Plan
from edgelab.laboratory import Laboratory
from harness.experiment import ranks_of
from harness.live import SECONDS, anew, rate, start
from harness.store import table

_LOOK_SECONDS = 0.05
_STEPS, _SKIPPED = 16, 5


def compare(hosts: list[Host], job: Path, out: Path, keys: dict[str, Any]) -> str:
    """Train in two labs, with and without the limit of the host that has one; returns a table."""
    small = next(n for n, host in enumerate(hosts) if host.memory)
    limit = hosts[small].memory or 0
    free = [dataclasses.replace(host, memory=None) for host in hosts]
    rows = []
    for name, fleet in ((f"{limit >> 20} MiB", hosts), ("no limit", free)):
        with Laboratory("experiment-hybrid-memory").using(fleet) as lab:
            directory = anew(out / f"memory-{name.replace(' ', '-')}")
            peak = _peak(lab, lab.hosts[small].name, job, directory, keys)
            with open_log(directory / "log.h5") as log:
                plan, steps = Plan.from_json(log.attrs["plan"]), log["steps"][:]
        held = next((stage for stage in plan.stages if small in stage.ranks), None)
        layers = f"{held.start} to {held.stop - 1}" if held else "none"
        rows.append([name, ranks_of(plan), layers, f"{peak / (1 << 20):.0f}", rate(steps, _SKIPPED, _STEPS)])
        print(f"memory: {rows[-1]}", flush=True)
    return table(["its memory", "ranks of the stages", "its layers", "most of its memory in use, MiB", "samples/s"], rows)


def _peak(lab: Laboratory, host: str, job: Path, directory: Path, keys: dict[str, Any]) -> int:
    """Train; returns the most bytes that the host's processes had in use at once (not files that the kernel may drop)."""
    settings = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    most = 0
    with start(lab, job, directory, *settings, "--set", f"train.steps={_STEPS}", drain=True) as running:
        until = time.monotonic() + SECONDS
        while running.process.poll() is None and time.monotonic() < until:
            most = max(most, sum(map(_in_use, lab.processes(host))))
            time.sleep(_LOOK_SECONDS)
    return most


def _in_use(pid: int) -> int:
    """Bytes of a process that the kernel cannot drop; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    kinds = ("RssAnon:", "RssShmem:")
    return 1024 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(kinds))
