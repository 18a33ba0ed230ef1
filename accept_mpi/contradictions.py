"""Settings of a job file that do not go together."""

from collections.abc import Iterator

from accept_mpi.job import Job, Pipeline, Train, flows


def contradictions(job: Job) -> Iterator[str]:
    """Yield a sentence on each, that begins with a key."""
    yield from _in_training(job.train)
    yield from _between(job.train, job.pipeline)
    yield from _in_pipeline(job.pipeline)
    if not job.output.directory.strip():
        yield f'output.directory: expected a directory, such as "runs/first", got "{job.output.directory}"'


def _in_training(train: Train) -> Iterator[str]:
    if (train.epochs is None) == (train.steps is None):
        yield "train: give either epochs or steps"
    if train.optimizer.name != "muon" and any(group.adamw for group in train.groups):
        yield 'train.groups: adamw = true goes with train.optimizer.name = "muon" only'
    if train.mix is not None and not train.mix.mixup and not train.mix.cutmix:
        yield "train.mix mixes nothing: give it mixup or cutmix, e.g. mixup = 0.2"
    if not isinstance(train.micro_batches, str) and train.micro_batches > train.batch_size:
        yield (
            f"train.micro_batches: {train.micro_batches} is more than train.batch_size = {train.batch_size}; a micro-batch "
            "needs at least one sample"
        )


def _between(train: Train, pipeline: Pipeline) -> Iterator[str]:
    if isinstance(train.micro_batches, str) and pipeline.cuts != "auto":
        yield 'train.micro_batches = "auto" goes with pipeline.cuts = "auto" only'
    if train.optimizer.correction != "none" and not flows(pipeline.schedule):
        yield (
            f'train.optimizer.correction goes with schedule = "1f1b-delayed" or "1f1b-async": in {pipeline.schedule} no '
            "gradient is older than the weights"
        )


def _in_pipeline(pipeline: Pipeline) -> Iterator[str]:
    for key, what in (("ranks", "chooses the ranks"), ("speeds", "measures the speeds")):
        if getattr(pipeline, key) and pipeline.cuts == "auto":
            yield f'pipeline.{key} goes with given cuts; cuts = "auto" {what}'
    if pipeline.vertical_sync and pipeline.schedule != "1f1b-async":
        yield 'pipeline.vertical_sync goes with schedule = "1f1b-async" only'
    if pipeline.recompute == "on" and pipeline.schedule == "zero-bubble":
        yield (
            'pipeline.recompute = "on" does not go with schedule = "zero-bubble", which keeps what weight gradients need '
            "beyond the backward"
        )
    if pipeline.lanes == "F+B" and flows(pipeline.schedule):
        yield (
            f'pipeline.lanes = "F+B" goes with synchronous schedules: in {pipeline.schedule} a backward needs the weights '
            "of its forward while another forward needs newer ones; a number of lanes goes with all"
        )
    if pipeline.lanes == "F+B" and pipeline.recompute == "on":
        yield (
            'pipeline.recompute = "on" does not go with lanes = "F+B": a forward that is computed again would undo what '
            "another one beside it does to running statistics; a number of lanes goes with it"
        )
