"""Surveys of devices that are not there: a run's own, changed, or a fleet on paper.

A device on paper is this machine, timed with the threads and the instruction set that the fleet gives it and then taken to
be as slow as its share of a core says; so figures are in the proportion of personas, and as good as those.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from accept_mpi import config
from accept_mpi.data import load as load_data
from accept_mpi.device import keep_memory
from accept_mpi.errors import UserError
from accept_mpi.fleet import Host
from accept_mpi.log import open_log
from accept_mpi.models import load as load_model
from accept_mpi.outline import Outline, outline_of
from accept_mpi.planner import codings_of
from accept_mpi.probe import LayerTimes, micro_batch, probe
from accept_mpi.profile import codec_costs
from accept_mpi.stage import find_loss
from accept_mpi.survey import Device, Survey
from accept_mpi.unmeasured import fill

_CARRIED = 0.93  # of a link's rate, through TCP and MPI
_UNLIMITED = 1e9  # bytes/s of a link without a limit
_LATENCY = 2e-4  # seconds
_BYTE_CPU = 2e-9  # seconds of a whole core to send or receive a byte through TCP
_DEADLINE = 300.0


def survey_of_log(path: Path) -> Survey:
    """What a run was planned from. Raises UserError where it was not planned by measuring."""
    with open_log(path) as log:
        if "survey" not in log:
            raise UserError(f'{path}: this run was not planned by measuring (pipeline.cuts = "auto")')
        return Survey.read(log["survey"])


def survey_of_fleet(hosts: Sequence[Host], job: Path, overrides: Iterable[str]) -> Survey:
    """A fleet on paper; times come from this machine."""
    measured: dict[tuple[str | None, int], tuple[Outline, LayerTimes, dict[str, tuple[float, float]]]] = {}
    devices = []
    for host in hosts:
        kind = (host.isa, host.threads)
        if kind not in measured:
            measured[kind] = _measure_here(host, job, list(overrides))
        model, times, costs = measured[kind]
        forward, backward, weights, update = (host.threads / host.cpu * fill([times], model)[:, 0]).tolist()
        devices.append(
            Device(
                host=host.name,
                forward=forward,
                backward=backward,
                weights=weights,
                update=update,
                encode={name: encode / min(1.0, host.cpu) for name, (encode, _) in costs.items()},
                decode={name: decode / min(1.0, host.cpu) for name, (_, decode) in costs.items()},
                byte=_BYTE_CPU / min(1.0, host.cpu),
                shared=True,
                memory=float(host.memory or 1 << 40),
            )
        )
    links = np.array([_bytes_per_second(host.link) for host in hosts])
    rate = np.minimum(links[:, None], links[None, :])
    return Survey(model, devices, rate.tolist(), np.full_like(rate, _LATENCY).tolist())


def joined(survey: Survey, more: Survey) -> Survey:
    """Both surveys' devices; a link between two of them is as fast as the slower one's own. Raises UserError."""
    if more.outline.key != survey.outline.key:
        raise UserError("the added devices were timed on another model or size of micro-batch than the log's")
    both = Survey(survey.outline, survey.devices + more.devices, [], [])
    count, before = len(both.devices), len(survey.devices)
    nics = np.array([survey.nic(n) for n in range(before)] + [more.nic(n) for n in range(count - before)])
    rate, latency = np.minimum(nics[:, None], nics[None, :]), np.full((count, count), _LATENCY)
    rate[:before, :before], latency[:before, :before] = survey.rate, survey.latency
    return msgspec.structs.replace(both, rate=rate.tolist(), latency=latency.tolist())


def with_link(survey: Survey, host: str, mbit: float) -> Survey:
    """The same with another link of one host. Raises UserError where there is no such host."""
    found = [n for n, device in enumerate(survey.devices) if device.host == host]
    if not found:
        known = ", ".join(dict.fromkeys(device.host for device in survey.devices))
        raise UserError(f"--link {host}: no such host; there are {known}")
    rate = np.array(survey.rate)
    for n in found:
        others = np.array([survey.nic(m) for m in range(len(survey.devices))])
        rate[n, :] = rate[:, n] = np.minimum(_bytes_per_second(mbit), others)
    return msgspec.structs.replace(survey, rate=rate.tolist())


def _bytes_per_second(mbit: float | None) -> float:
    return _CARRIED * mbit * 1e6 / 8 if mbit else _UNLIMITED


def _measure_here(host: Host, job: Path, overrides: list[str]) -> tuple[Outline, LayerTimes, dict[str, tuple[float, float]]]:
    """This machine with a host's threads and instruction set, which a process takes at its start."""
    command = [sys.executable, "-m", "accept_mpi.whatif", str(job), *overrides]
    environment = os.environ | host.environment()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_DEADLINE)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{job}: timing layers on this machine took longer than {_DEADLINE:.0f} s") from error
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"{job}: layers cannot be timed on this machine: {text[-1] if text else 'no message'}")
    found: Any = msgspec.msgpack.decode(done.stdout, type=tuple[Outline, LayerTimes, dict[str, tuple[float, float]]])
    return found


def _measure(path: Path, overrides: list[str]) -> None:
    """Write the outline, times and codec costs of this process to standard output."""
    job = config.parse(path.read_text(), str(path), overrides)
    keep_memory()
    chain = load_model(job.model.name, job.model.args, job.train.seed)
    train, _ = load_data(job.data.name, job.data.args)
    inputs, target = micro_batch(train, job)
    model = outline_of(chain, job, inputs)
    times = probe(chain, model, job, find_loss(job.train.loss), inputs, target, job.pipeline.probe_seconds)
    costs = {name: codec_costs(coding) for name, coding in codings_of(job).items()}
    sys.stdout.buffer.write(msgspec.msgpack.encode((model, times, costs)))


if __name__ == "__main__":
    try:
        _measure(Path(sys.argv[1]), sys.argv[2:])
    except UserError as mistake:
        sys.exit(str(mistake))
