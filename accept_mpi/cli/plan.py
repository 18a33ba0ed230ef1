"""``accept_mpi plan``: predicts, without a cluster, how fast a job would run on other devices, links and cuts."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from accept_mpi.cli.whatif import cluster_of_fleet, cluster_of_log, joined, with_links
from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.device.fleet import Host, parse, read
from accept_mpi.direction import Direction
from accept_mpi.errors import UserError, counted
from accept_mpi.files.regular import replacing
from accept_mpi.job import Job
from accept_mpi.job_file import parse as parse_job
from accept_mpi.job_file import read_text
from accept_mpi.logs.figures import draw_timeline
from accept_mpi.logs.reader import open_log
from accept_mpi.logs.timeline import steady_window
from accept_mpi.planning.codec_choice import check_codecs
from accept_mpi.planning.estimate import Estimate, estimate, forecast_of
from accept_mpi.planning.job_plan import plan_from_job
from accept_mpi.planning.micro_batches import best_of, of_size, tried
from accept_mpi.planning.tables import lanes_table, stage_table, verdict
from accept_mpi.profiling.cluster_profile import ClusterProfile


def main(options: argparse.Namespace) -> int:
    """Print the plan that a job would get on the devices of a run or a fleet, with added devices and changed links."""
    job = parse_job(read_text(options.job), str(options.job), options.set)
    check_codecs(job.pipeline)
    if any(not isinstance(names, str) for names in (job.pipeline.forward, job.pipeline.backward)):
        raise UserError('plan compares cuts, which a list of codecs by boundary fits once: name one codec, or "auto"')
    hosts = _added(options.add)
    if options.log is not None:
        cluster = cluster_of_log(options.log, job)
        job = of_size(job, cluster.outline.samples)
        surveys = [(job, joined(cluster, _on_paper(hosts, options, job)) if hosts else cluster)]
    else:
        hosts = [*(read(options.fleet) if options.fleet is not None else []), *hosts]
        if not hosts:
            raise UserError("plan needs devices: --log LOG.h5 of a run, --fleet FLEET.toml, or --add PERSONA")
        surveys = [(one, _on_paper(hosts, options, one)) for one in tried(job, len(hosts))]
    job, cluster, best, even, chosen = best_of([(one, with_links(found, dict(options.link))) for one, found in surveys])
    given = None
    if job.pipeline.cuts != "auto":
        given = estimate(
            cluster,
            job,
            plan_from_job(job, len(cluster.outline.layers), len(cluster.devices), lambda: cluster.outline.shared),
        )
    if options.json:
        found = {"plan": _plain(best), "even": _plain(even)} | ({"given": _plain(given)} if given else {})
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(*stage_table(cluster, best, micro_batches_of(job)), sep="\n")
        print("\neven cuts:", *stage_table(cluster, even, micro_batches_of(job)), sep="\n")
        if given:
            print("\nthe job's own cuts:", *stage_table(cluster, given, micro_batches_of(job)), sep="\n")
            print(f"a step should take {1e3 * given.step:.0f} ms ({given.step / best.step:.1f} x the plan's)")
        print("", *([chosen] if chosen else []), *verdict(cluster, job, best, even), sep="\n")
        if options.lanes:
            print("", *lanes_table(cluster, job, best), sep="\n")
        if options.log is not None and not (hosts or options.link):
            print(*_measured(options.log), sep="\n")
    if options.timeline is not None:
        _draw(options.timeline, cluster, job, best)
        print(f"{options.timeline}: some steps as they would run", file=sys.stderr)
    return 0


def _on_paper(hosts: Sequence[Host], options: argparse.Namespace, job: Job) -> ClusterProfile:
    """The cluster profile of a fleet on paper for the job of the command line, with its number of micro-batches decided."""
    overrides = [*options.set, f"train.micro_batches={micro_batches_of(job)}"]
    return cluster_of_fleet(hosts, options.job, overrides)


def _added(personas: list[str]) -> list[Host]:
    """Hosts from texts such as "pi5" or "pi5:2". Raises UserError."""
    hosts: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for text in personas:
        name, _, count = text.partition(":")
        if count and not re.fullmatch("[1-9][0-9]?", count):
            raise UserError(f'--add {text}: expected a persona and how many, from 1 to 99, such as "pi5:2"')
        for _ in range(int(count or 1)):
            counts[name] += 1
            hosts.append({"persona": name, "name": f"{name}-new{counts[name]}"})
    return parse({"hosts": hosts}, "--add") if hosts else []


def _plain(found: Estimate) -> dict[str, Any]:
    """An estimate as plain data for JSON: stages and codecs, seconds, shares and bytes by device."""
    codecs = [
        {"forward": found.choices[b, Direction.FORWARD].name, "backward": found.choices[b, Direction.BACKWARD].name}
        for b in range(len(found.plan.boundaries))
    ]
    return {
        "stages": msgspec.to_builtins(found.plan.stages), "codecs": codecs, "step_seconds": found.step,
        "busy": found.busy, "compute_seconds": found.computes, "memory_bytes": found.memory,
    }  # fmt: skip


def _measured(path: Path) -> list[str]:
    """A line with the run's own seconds per step; none if it has fewer than four steps."""
    with open_log(path) as log:
        ends, plan = log["steps"]["end"][:], log.attrs["plan"]
    if len(ends) < 4:
        return []
    stages = len(msgspec.json.decode(plan)["stages"])
    return [
        f"the run itself took {1e3 * np.median(np.diff(ends)):.0f} ms per step (median), over {counted(stages, 'stage')}"
    ]


def _draw(path: Path, cluster: ClusterProfile, job: Job, found: Estimate) -> None:
    ranks = [rank for _, rank, _ in found.plan.slots]  # each lane is a device of the forecast
    codecs = {crossing: choice.name for crossing, choice in found.choices.items()}
    trace = forecast_of(cluster, job, found.plan).trace(codecs, ranks)
    hosts = {rank: cluster.devices[rank].host for rank in ranks}
    try:
        with replacing(path) as beside:
            draw_timeline(beside, trace, hosts, *steady_window(trace))
    except (OSError, ValueError) as error:
        raise UserError(f"--timeline {path}: {getattr(error, 'strerror', None) or error}") from error
