"""Tells which settings of a job have no effect beside its other ones, so that nobody waits for one."""

from accept_mpi.job import Job, Optimizer, Pipeline, Recovery, Train


def without_effect(job: Job, survives: bool) -> list[str]:
    """A sentence for each setting that changes nothing. ``survives``: whether the run can survive the loss of a process."""
    train, pipeline, recovery = job.train, job.pipeline, job.recovery
    given = pipeline.cuts != "auto"
    groups = any(isinstance(one, list) and len(one) > 1 for one in pipeline.ranks) if given else pipeline.groups
    codecs = [pipeline.forward, pipeline.backward]
    chosen = "auto" in [*codecs, *(name for one in codecs if isinstance(one, list) for name in one)]
    chosen_sums = pipeline.gradients == "auto" and groups and not given
    # What stages sum of a parameter that they have in common, too, which only the model says.
    sums_ties = job.parts_ties and pipeline.cuts != [] and pipeline.gradients != "auto"
    tied = ", unless stages have a parameter in common" if sums_ties else ""
    decays = train.optimizer.weight_decay or any(group.weight_decay for group in train.groups)
    mortal = "this MPI ends with the first process that is lost (mpirun --with-ft ulfm)"
    single = train.micro_batches == train.batch_size
    told = {
        "train.mix": (train.mix is not None and single, "a micro-batch has one sample, which is mixed with no other"),
        "train.loss": (
            train.loss != Train().loss and job.model.output == "loss",
            'with model.output = "loss" the model computes its loss itself',
        ),
        "train.metrics": (train.metrics and not train.evaluate_every, "train.evaluate_every = 0 evaluates nothing"),
        "train.optimizer.decay_vectors": (
            train.optimizer.decay_vectors != Optimizer().decay_vectors and not decays,
            "there is no weight_decay",
        ),
        "model.strict": (not job.model.strict and not job.model.weights, "there are no model.weights to load"),
        "pipeline.speeds": (pipeline.speeds and not groups, "pipeline.ranks has no ranks that hold a stage together"),
        "pipeline.gradients": (
            pipeline.gradients != Pipeline().gradients and not groups,
            ("no ranks hold a stage together" if given else "pipeline.groups = false") + tied,
        ),
        **{
            f"pipeline.{key}": (
                getattr(pipeline, key) not in (getattr(Pipeline(), key), "none") and given and not pipeline.adapt,
                'pipeline.cuts is not "auto"',
            )
            for key in ("probe_seconds", "latency_db")
        },
        "pipeline.recompute": (
            pipeline.recompute == "on" and pipeline.cuts == [],
            "the last stage, here the only one, goes back directly after each forward",
        ),
        "pipeline.entropy": (pipeline.entropy and not chosen, 'neither pipeline.forward nor backward is "auto"'),
        "pipeline.min_bits": (
            pipeline.min_bits != Pipeline().min_bits and not chosen and not chosen_sums,
            'neither pipeline.forward nor backward is "auto"',
        ),
        "pipeline.transfer_slack": (
            pipeline.transfer_slack != "auto" and pipeline.schedule == "gpipe",
            "gpipe has all micro-batches of a step in flight",
        ),
        "recovery.replicate_every": (
            recovery.replicate_every not in (Recovery().replicate_every, 0) and not survives,
            mortal,
        ),
        "recovery.mean_time_between_failures": (
            recovery.mean_time_between_failures != Recovery().mean_time_between_failures
            and (recovery.replicate_every != "auto" or not survives),
            mortal if not survives else 'recovery.replicate_every is not "auto"',
        ),
    }
    found = [f"{key} has no effect: {why}" for key, (idle, why) in told.items() if idle]
    for group in train.groups:
        if group.lr is None and group.weight_decay is None and not group.adamw:
            found.append(f"train.groups: {group.names} has no settings of its own")
    return found
