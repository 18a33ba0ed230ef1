"""From a job file to a running pipeline: what all ranks agree on, in order, and then the training loop."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch

from accept_mpi import config
from accept_mpi.batches import Batches, cut
from accept_mpi.codec import Signature
from accept_mpi.coding import parse, prepare
from accept_mpi.comm.messenger import Messenger
from accept_mpi.comm.plane import DataPlane, Endpoint
from accept_mpi.comm.runtime import Agreed, Runtime
from accept_mpi.controller import Bystander, Controller, begin_log, decide_plan, facts_of, prepare_directory, summary_line
from accept_mpi.data import load as load_data
from accept_mpi.device import keep_memory, set_threads
from accept_mpi.errors import DeadlineError, UserError
from accept_mpi.log import BACKWARD, FORWARD
from accept_mpi.logging_observer import LogObserver
from accept_mpi.models import Chain
from accept_mpi.models import load as load_model
from accept_mpi.models.layers import build_layers
from accept_mpi.observers import Observer
from accept_mpi.plan import Place, Plan
from accept_mpi.progress import ProgressObserver
from accept_mpi.recorder import Recorder
from accept_mpi.schedule import depth
from accept_mpi.settle import codings, settle_codecs
from accept_mpi.signature import agree_on_shapes
from accept_mpi.snapshot import PARTS, Checkpoint, CheckpointWriter, Manifest, directory_of, new_manifest
from accept_mpi.stage import Loss, Stage, find_loss
from accept_mpi.surveying import Data, Surveyed, learn, plan_by_measuring
from accept_mpi.worker import Course, Links, Worker


@dataclass(frozen=True)
class Options:
    """The command line of ``train``."""

    job: Path
    overrides: tuple[str, ...] = ()
    resume: Path | None = None
    quiet: bool = False


def train(runtime: Runtime, options: Options) -> None:
    """Train as the job file says. Raises UserError on all ranks alike for what the user can mend."""
    job = read_job(runtime, options)
    runtime.startup_seconds = job.pipeline.startup_timeout
    versions = runtime.hosts[runtime.rank]["versions"]
    runtime.same("versions of accept_mpi and torch", f"{versions['accept_mpi']} and {versions['torch']}")
    keep_memory()
    threads = set_threads(job.train.threads, runtime.hosts[runtime.rank]["cores"], runtime.ranks_on_host)

    checkpoint = runtime.agree("the checkpoint", lambda: _open_checkpoint(options.resume, runtime.rank))
    manifest = _share_manifest(runtime, checkpoint)
    chain = runtime.agree("the model", lambda: load_model(job.model.name, job.model.args, job.train.seed))
    runtime.same("layers of the model", chain.names)
    loss = runtime.agree("the loss", lambda: find_loss(job.train.loss))
    data: Data | None = None
    planned: Surveyed | None = None
    if job.pipeline.cuts == "auto" and runtime.size > 1:
        planned = plan_by_measuring(runtime, job, chain, loss)
        plan, data = planned.plan, planned.data
    else:
        plan = runtime.agree("the plan", lambda: decide_plan(job, len(chain), runtime.size))
    compiling = prepare(list(codings(job, plan).values()))
    compile_seconds = max(runtime.messenger.allgather(compiling, runtime.startup_seconds, "compiled kernels"))
    place = plan.place(runtime.rank)
    runtime.holds = lambda rank: _holds(plan, rank)
    data = runtime.agree("the data", lambda: _data_for(job, place, data))
    train_samples, test_samples = _agree_on_data(runtime, data)
    batches = Batches(train_samples, job.train.batch_size, job.train.micro_batches, job.train.seed, job.train.drop_last)
    course = runtime.agree("the length of the run", lambda: _course(job, batches, manifest, chain, train_samples))

    stage = _make_stage(runtime, job, chain, plan.layers_of(runtime.rank), loss if place.last else None)
    if manifest:
        _restore(runtime, checkpoint, plan, stage)
    counts = runtime.messenger.allgather(stage.size, runtime.startup_seconds, "the number of parameters")
    sizes = _sizes(batches, test_samples if course.evaluate_every else 0)
    signatures = agree_on_shapes(runtime.messenger, stage, place, sizes, data[0], job.pipeline.startup_timeout)

    plan, reasons = settle_codecs(runtime, job, plan, stage, max(sizes[0]), signatures, data[0])
    facts = facts_of(
        runtime.hosts, plan, chain.names, sum(counts), threads=threads, first_step=course.first, last_step=course.last,
        compile_s=compile_seconds, plan_why=planned.lines if planned else [],
        forecast_step_s=planned.step if planned else None, codecs_why=reasons,
    )  # fmt: skip
    controller = None
    if runtime.rank == 0:
        controller = runtime.agree(
            "the output directory",
            lambda: _start_records(runtime, job, options, plan, chain, course, batches, facts, planned),
        )
    else:
        runtime.agree("the output directory", lambda: None)
    recorder = Recorder(runtime.clock, runtime.rank, place.stage)
    bystander = Bystander()
    plane = DataPlane(runtime.world, runtime.messenger, recorder, controller.handle if controller else bystander.handle)
    links = _connect(plane, job, plan, place, signatures, batches)
    plane.start()
    if not place.idle:
        worker = Worker(job, place, stage, links, plane, recorder, batches, data, chain.names, runtime.lifeline.begin_step)
        worker.train(course, controller.deliver if controller else lambda: None, test_samples)
        worker.ship_trace()
    _end(runtime, job, plan, plane, controller or bystander, course)
    if planned and planned.survey:
        learn(job, planned, plan, Path(job.output.directory) / "log.h5")
        share = planned.seconds / runtime.clock.now()
        print(f"planning    {planned.seconds:.1f} s, {100 * share:.0f} % of the run", flush=True)


# -- start ---------------------------------------------------------------------------------------------------------------


def read_job(runtime: Runtime, options: Options) -> config.Job:
    """Rank 0's job file, on every rank; a rank that has a file under the same path must have the same text there."""

    mine = runtime.agree("the job file", lambda: config.read_text(options.job) if runtime.rank == 0 else None)
    text = runtime.messenger.broadcast(mine, runtime.startup_seconds, "the job file")

    def check() -> config.Job:
        if runtime.rank and options.job.is_file() and config.read_text(options.job) != text:
            raise UserError(f"{options.job}: differs from rank 0's file of the same name on {runtime.hosts[0]['host']}")
        return config.parse(text, str(options.job), options.overrides)

    return runtime.agree("the job file", check)


def _open_checkpoint(path: Path | None, rank: int) -> Checkpoint | None:
    return Checkpoint(path) if path is not None and rank == 0 else None


def _share_manifest(runtime: Runtime, checkpoint: Checkpoint | None) -> Manifest | None:
    mine = msgspec.to_builtins(checkpoint.manifest) if checkpoint else None
    shared = runtime.messenger.broadcast(mine, runtime.startup_seconds, "the checkpoint's manifest")
    return msgspec.convert(shared, Manifest) if shared else None


def _holds(plan: Plan, rank: int) -> str:
    layers = plan.layers_of(rank)
    return f"stage {plan.place(rank).stage}, layers {layers[0]}..{layers[-1]}" if layers else "idle"


def _data_for(job: config.Job, place: Place, loaded: Data | None) -> Data:
    """Training and test set where the stage needs inputs or targets."""
    if not (place.first or place.last):
        return None, None
    return loaded or load_data(job.data.name, job.data.args)


def _agree_on_data(runtime: Runtime, data: Data) -> tuple[int, int]:
    """Numbers of training and test samples; first and last stage must have found the same data."""
    mine = None
    if data[0] is not None and data[1] is not None:
        some = torch.arange(min(64, len(data[0]))).numpy()
        mine = [len(data[0]), len(data[1]), data[0].targets(some).double().sum().item()]
    found = [d for d in runtime.messenger.allgather(mine, runtime.startup_seconds, "the sizes of the data") if d]
    if any(other != found[0] for other in found):
        raise Agreed(
            "data.name: the first and the last stage's hosts have different data: "
            f"{found[0][0]} and {found[0][1]} samples on rank 0, {found[-1][0]} and {found[-1][1]} on the last, "
            "or other targets; give both the same files",
        )
    return found[0][0], found[0][1]


def _course(job: config.Job, batches: Batches, manifest: Manifest | None, chain: Chain, train_samples: int) -> Course:
    """How many steps, from where. Raises UserError where the checkpoint is another model's or already at the end."""
    per_epoch = batches.steps_per_epoch
    last = job.train.steps if job.train.steps is not None else (job.train.epochs or 1) * per_epoch
    first = 0
    if manifest:
        if manifest.layers != chain.names:
            raise UserError(
                f"--resume: the checkpoint holds another model ({manifest.model}, {len(manifest.layers)} layers) "
                f"than the job names ({job.model.name}, {len(chain)} layers)"
            )
        if manifest.samples != train_samples:
            raise UserError(
                f"--resume: the checkpoint was trained on {manifest.samples} samples, the job's data has {train_samples}"
            )
        first = manifest.step
        if first >= last:
            raise UserError(f"--resume: the checkpoint is at step {first}, and the job ends at step {last}")
    output = job.output
    return Course(
        first,
        last,
        job.train.evaluate_every * per_epoch,
        output.checkpoint_every,
        checkpoint_at_end=output.checkpoint_at_end,
    )


def _make_stage(runtime: Runtime, job: config.Job, chain: Chain, mine: range, loss: Loss | None) -> Stage:
    layers = runtime.agree("the layers", lambda: build_layers(chain, mine.start, mine.stop, job.train.seed))
    convolutional = runtime.messenger.allgather(layers.has_conv2d, runtime.startup_seconds, "the memory format")
    memory_format = job.train.memory_format
    channels_last = any(convolutional) if memory_format == "auto" else memory_format == "channels_last"
    return Stage(layers, job, loss, channels_last)


def _restore(runtime: Runtime, checkpoint: Checkpoint | None, plan: Plan, stage: Stage) -> None:
    """Rank 0 sends each rank the state of the layers that it holds now, one rank after another."""
    messenger, seconds = runtime.messenger, runtime.startup_seconds

    def state_of(rank: int) -> dict[str, bytes]:
        assert checkpoint is not None
        return {part: safetensors.torch.save(checkpoint.tensors(part, plan.layers_of(rank))) for part in PARTS}

    if runtime.rank == 0:
        for rank in range(1, runtime.size):
            _send_state(messenger, rank, state_of(rank), seconds)
        state = state_of(0)
    else:
        state = {part: _receive_bytes(messenger, 0, part, seconds) for part in PARTS}
    weights, optimizer = (safetensors.torch.load(state[part]) for part in PARTS)
    runtime.agree("the checkpoint's weights", lambda: stage.load(weights, optimizer))


_PIECE = 16 << 20


def _send_state(messenger: Messenger, rank: int, state: dict[str, bytes], seconds: float) -> None:
    for part, data in state.items():
        messenger.send(rank, f"{part} bytes", len(data))
        for offset in range(0, len(data), _PIECE):
            messenger.send(rank, part, data[offset : offset + _PIECE])
            messenger.flush(seconds, f"the checkpoint's {part} for rank {rank}")


def _receive_bytes(messenger: Messenger, source: int, part: str, seconds: float) -> bytes:
    awaited = f"the checkpoint's {part}"
    total = messenger.expect(f"{part} bytes", {source}, seconds, awaited)[source]
    data = bytearray()
    while len(data) < total:
        data += messenger.expect(part, {source}, seconds, awaited)[source]
    return bytes(data)


def _sizes(batches: Batches, test_samples: int) -> tuple[list[int], list[int]]:
    """Every number of samples that a micro-batch of this run can have: in training, in evaluation."""
    training = {*batches.sizes(0), *batches.sizes(batches.steps_per_epoch - 1)}
    return sorted(training, reverse=True), sorted(set(cut(test_samples, batches.micro)), reverse=True)


def _start_records(
    runtime: Runtime,
    job: config.Job,
    options: Options,
    plan: Plan,
    chain: Chain,
    course: Course,
    batches: Batches,
    facts: dict[str, Any],
    planned: Surveyed | None,
) -> Controller:
    """Rank 0: output directory, log, checkpoint writer, progress."""
    directory = Path(job.output.directory)
    prepare_directory(directory)
    writer = begin_log(directory, job, plan, facts, course.first, planned.survey if planned else None)
    observers: dict[str, Observer] = {"log": LogObserver(writer)}
    if not options.quiet:
        if facts["compile_s"] > 0.05:
            print(f"kernels ready after {facts['compile_s']:.1f} s", flush=True)
        for lines in (facts["plan_why"], facts["codecs_why"]):
            if lines:
                print(*lines, sep="\n", flush=True)
        observers["progress"] = ProgressObserver(course.last, course.first)

    def manifest(step: int) -> Manifest:
        return new_manifest(
            step=step,
            epoch=batches.epoch(step),
            model=job.model.name,
            model_args=job.model.args,
            layers=chain.names,
            seed=job.train.seed,
            samples=batches.samples,
            job=job.to_json(),
        )

    edges = [(stage.start, stage.stop) for stage in plan.stages]
    controller = Controller(observers, CheckpointWriter(directory, edges, manifest, job.output.keep))

    def before_end(text: str) -> None:
        observers["log"].event(runtime.clock.now(), runtime.lifeline.steps.get(0, 0), text)
        controller.each("close")

    runtime.before_end = before_end
    return controller


def _connect(
    plane: DataPlane,
    job: config.Job,
    plan: Plan,
    place: Place,
    signatures: tuple[Signature, Signature],
    batches: Batches,
) -> Links:
    """Endpoints to both neighbours. A link holds at most what the stage before it may have in flight."""

    def end(peer: int, boundary: int, direction: int, signature: Signature) -> Endpoint:
        kind, slack = job.pipeline.schedule, job.pipeline.transfer_slack
        in_step = len(batches.sizes(0))
        limit = depth(kind, boundary, len(plan.stages), in_step if kind != "1f1b-async" else 1 << 30, slack)
        names = plan.boundaries[boundary]
        coding = parse(names.backward, True) if direction == BACKWARD else parse(names.forward, False)
        return Endpoint(peer, boundary, direction, signature.direction(direction), limit, coding, job.train.seed)

    behind, ahead = signatures
    s, before, after = place.stage, place.before, place.after
    return Links(
        activations_in=None if before is None else plane.incoming(end(before, s - 1, FORWARD, behind)),
        activations_out=None if after is None else plane.outgoing(end(after, s, FORWARD, ahead)),
        gradients_in=None if after is None else plane.incoming(end(after, s, BACKWARD, ahead)),
        gradients_out=None if before is None else plane.outgoing(end(before, s - 1, BACKWARD, behind)),
    )


# -- end -----------------------------------------------------------------------------------------------------------------


def _end(
    runtime: Runtime,
    job: config.Job,
    plan: Plan,
    plane: DataPlane,
    role: Controller | Bystander,
    course: Course,
) -> None:
    """Everything is sent, the last checkpoint is on the disk, the log is closed. An idle rank waits here for the others."""
    seconds = job.pipeline.startup_timeout
    idle = [rank for rank in range(runtime.size) if plan.place(rank).idle]
    plane.post(0, "leaving", None)
    controller = role if isinstance(role, Controller) else None
    if controller:
        controller.wait_for_all(runtime.size, math.inf if 0 in idle else seconds, plane.check)
        newest = course.newest_checkpoint
        if newest is not None and not controller.writer.wait(newest, seconds):
            raise DeadlineError(f"waited {seconds:.0f} s for the last checkpoint to reach the disk")
        controller.deliver()
        for rank in idle:
            plane.post(rank, "over", None)
    elif runtime.rank in idle and isinstance(role, Bystander):
        role.wait(plane.check)
    plane.stop(seconds)
    if controller:
        directory = Path(job.output.directory)
        controller.each("event", runtime.clock.now(), course.last, f"done: {summary_line(controller.last_evaluation)}")
        controller.each("close")
        print(f"log         {directory / 'log.h5'}", flush=True)
        if newest is not None:
            print(f"checkpoint  {directory_of(directory, newest)}", flush=True)
