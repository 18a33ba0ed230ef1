"""The start of a run: all ranks agree on job, output directory, versions and model, and use what an earlier start left."""

import contextlib
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from accept_mpi.comm.runtime import Runtime
from accept_mpi.device.allocator import keep_memory
from accept_mpi.device.compute import DEVICE, select
from accept_mpi.device.cpu import set_threads
from accept_mpi.device.facts import package_version, release
from accept_mpi.errors import UserError
from accept_mpi.idle_settings import without_effect
from accept_mpi.job import Job
from accept_mpi.job_file import parse, read_text
from accept_mpi.launch.ownership import Ownership
from accept_mpi.launch.run_identity import RunIdentity
from accept_mpi.models import Chain, Whole, check_changes, library_of, model_of
from accept_mpi.models.losses import loss_of
from accept_mpi.models.metrics import metrics_of
from accept_mpi.models.recording.key import keyed, value_of
from accept_mpi.planning.codec_choice import check_codecs
from accept_mpi.planning.micro_batches import settled, tried
from accept_mpi.prediction.database import check_database
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.profiling.layer_timer import micro_batch
from accept_mpi.recovery.disk_replicas import DiskReplicas
from accept_mpi.recovery.layer_state import fitting
from accept_mpi.recovery.manifest import Manifest
from accept_mpi.recovery.replicas import Replicas
from accept_mpi.training.alike import agree_on_code, agree_on_model
from accept_mpi.training.data_here import Data, load_here
from accept_mpi.training.deployment import RankState


def read_job(runtime: Runtime, path: Path, overrides: Sequence[str]) -> Job:
    """The job in rank 0's file, on every rank; all ranks call this together. Raises Agreed if the job is not valid, or a
    rank has another text in a file of the same path."""
    mine = runtime.agree("the job file", lambda: read_text(path) if runtime.rank == 0 else None)
    text = runtime.messenger.broadcast(mine, runtime.startup_seconds, "the job file")

    def check() -> Job:
        if runtime.rank and os.path.isfile(path) and read_text(path) != text:
            raise UserError(f"{path}: differs from rank 0's file of the same name on {runtime.hosts[0]['host']}")
        return parse(text, str(path), overrides)

    return runtime.agree("the job file", check)


@dataclass(frozen=True)
class Options:
    """Options on the command line of ``train``."""

    job: Path
    overrides: tuple[str, ...] = ()
    resume: Path | None = None
    quiet: bool = False
    supervised: RunIdentity | None = None
    """The run's identity under ``launch``, else None."""


@contextlib.contextmanager
def own(runtime: Runtime, directory: Path, supervised: RunIdentity | None) -> Iterator[Ownership]:
    """Own the output directory within the context. All ranks call this together, before a run touches anything.

    Rank 0 takes the directory if it exists. Otherwise it must call ``Ownership.take`` as soon as it has made it, and so must
    a rank that becomes rank 0 later. Raises Agreed if another run has the directory, or mpirun has placed ranks wrongly.
    """
    runtime.agree("the hosts", lambda: _check_place(supervised, runtime.rank, runtime.host))
    mine = supervised.name if supervised else secrets.token_hex(8)
    run = runtime.messenger.broadcast(mine, runtime.startup_seconds, "the run's name")
    ownership = Ownership(directory, run, supervised is not None)
    runtime.agree("the output directory", lambda: ownership.begin() if runtime.rank == 0 else None)
    try:
        yield ownership
    finally:
        ownership.release()


def _check_place(supervised: RunIdentity | None, rank: int, host: str) -> None:
    """Raise UserError if mpirun started another number of ranks on this host than the host file asks for."""
    wrong = supervised.misplaced(rank) if supervised else None
    if wrong:
        raise UserError(f"{host}: {wrong}")


def prepare(runtime: Runtime, job: Job, options: Options) -> RankState:
    """Prepare everything that needs no plan: versions, threads, model and loss, and the snapshots that this host kept from
    an earlier start. All ranks call this together. Raises Agreed."""
    facts = runtime.hosts[runtime.rank]
    versions = facts["versions"]
    runtime.same("versions of accept_mpi and torch", f"{versions['accept_mpi']} and {release(versions['torch'])}")
    if library := library_of(job.model.name):
        runtime.same(f"versions of {library}", release(package_version(library)))
    runtime.agree("the codecs", lambda: check_codecs(job.pipeline))
    keep_memory()
    where = job.train.device, facts["host"], place_on_host(runtime)
    runtime.agree("the device", lambda: select(*where))
    database = job.pipeline.latency_db if runtime.rank == 0 and job.pipeline.cuts == "auto" else "none"
    runtime.agree("the latency database", lambda: check_database(database))
    threads = set_threads(job.train.threads, facts["cores"], runtime.ranks_on_host)
    begun = job.without_weights() if options.resume else job  # the file may be gone by then
    chain, data = _model(runtime, begun)
    agree_on_code(runtime)
    agree_on_model(runtime, chain)
    changed = runtime.agree("the weights", lambda: check_changes(chain, begun))
    left = "model.weights is not read: a checkpoint has others" if begun != job else ""
    names = ", ".join(chain.undivided)
    kept = f"not divided, since what they compute depends on values: {names}" if names else ""
    if chain.one_layer:
        kept = f"the model is one layer, which ranks may share but not divide: {chain.one_layer}"
    delayed = job.pipeline.schedule == "1f1b-delayed" and job.train.clip_norm is None
    clip = "gradients are an update old and not clipped: if the loss does not fall, set train.clip_norm" if delayed else ""
    for line in (kept, changed, left, clip, _idle_gpus(runtime, job), *without_effect(job, runtime.survives)):
        if line and runtime.rank == 0 and not options.quiet:
            print(line, flush=True)
    loss = runtime.agree("the loss", lambda: loss_of(job))
    loss.metrics = runtime.agree("the metrics", lambda: metrics_of(job))
    disk = DiskReplicas(options.supervised, facts["host"]) if options.supervised else None
    replicas = Replicas(disk)
    if disk and place_on_host(runtime) == 0:
        for step, blobs in disk.read().items():
            replicas.keep(step, fitting(blobs, chain.names))
    return RankState(job, chain, loss, replicas, disk, threads, data)


def _idle_gpus(runtime: Runtime, job: Job) -> str:
    """A sentence about hosts whose GPUs the job leaves out, perhaps unknowingly; empty if there are none."""
    idle = sorted({facts["host"] for facts in runtime.hosts if facts["gpus"]}) if job.train.device == "cpu" else []
    if not idle or DEVICE in os.environ:
        return ""
    have = "has a GPU" if len(idle) == 1 else "have GPUs"
    return f'{", ".join(idle)} {have}, which this job does not use: train.device = "auto" would'


def _model(runtime: Runtime, job: Job) -> tuple[Chain, Data]:
    """The model as a chain, and the data if they were needed for it: a model with a forward of its own is recorded for
    micro-batches as one rank, which has data, tells all."""
    model = runtime.agree("the model", lambda: model_of(job))
    whole = runtime.messenger.allgather(isinstance(model, Whole), runtime.startup_seconds, "the kind of model")
    if not any(whole):
        assert isinstance(model, Chain)
        return model, (None, None)
    data, source = load_here(runtime, job)
    any_size = tried(job, runtime.size)[0]
    key = runtime.agree(
        "a micro-batch", lambda: keyed(micro_batch(data[0], any_size).value)[0] if data[0] is not None else None
    )
    told = runtime.messenger.allgather(key, runtime.startup_seconds, "the shapes of a micro-batch")

    def recorded() -> Chain:
        assert isinstance(model, Whole)
        return model.record(value_of(told[source])[0])

    return runtime.agree("the model", recorded), data


def room_here(runtime: Runtime, disk: DiskReplicas | None) -> float:
    """Most bytes that this rank may take; infinite unless an earlier start ran out of memory here."""
    return disk.room(place_on_host(runtime)) if disk else math.inf


def known_cluster(runtime: Runtime, disk: DiskReplicas | None, room: float) -> ClusterProfile | None:
    """The profile that an earlier start measured of the hosts that are here now, if any rank has kept one; else None. All
    ranks call this together. ``room``: most bytes of memory that this rank may take."""
    mine = [disk.cluster() if disk else None, room]
    told = runtime.messenger.allgather(mine, runtime.startup_seconds, "what an earlier start has measured")
    wanted, rooms = [host["host"] for host in runtime.hosts], [room for _, room in told]
    for kept in filter(None, (kept for kept, _ in told)):
        with contextlib.suppress(msgspec.ValidationError, IndexError):  # a damaged profile
            cluster = msgspec.convert(kept, ClusterProfile)
            there = [device.host for device in cluster.devices]
            if len(set(there)) == len(there) and set(wanted) <= set(there):
                return cluster.only([there.index(host) for host in wanted]).within(rooms)
    return None


def shared_origin(runtime: Runtime, origin: Manifest | None, disk: DiskReplicas | None) -> Manifest | None:
    """The manifest of the checkpoint with which the run has begun, if any rank knows it (``origin``) or has kept it of an
    earlier start. All ranks call this together."""
    mine = msgspec.to_builtins(origin) if origin else disk.origin() if disk else None
    for kept in runtime.messenger.allgather(mine, runtime.startup_seconds, "the checkpoint that the run began with"):
        if kept is not None:
            with contextlib.suppress(msgspec.ValidationError):  # a damaged one
                return msgspec.convert(kept, Manifest)
    return None


def with_kept_micro_batches(runtime: Runtime, disk: DiskReplicas | None, job: Job) -> Job:
    """The job with the number of micro-batches that an earlier start of the run has found, if any rank has kept it. All
    ranks call this together."""
    mine = disk.micro_batches() if disk else None
    told = runtime.messenger.allgather(mine, runtime.startup_seconds, "the number of micro-batches")
    kept = [count for count in told if count is not None]
    return settled(job, kept[0]) if kept else job


def place_on_host(runtime: Runtime) -> int:
    """This rank's number among the ranks of its host, counted from 0."""
    mine = runtime.hosts[runtime.rank]["machine_id"]
    return [n for n, facts in enumerate(runtime.hosts) if facts["machine_id"] == mine].index(runtime.rank)
