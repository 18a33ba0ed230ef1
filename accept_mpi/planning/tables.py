"""Shows plans as text: a table of the stages, and the step times expected of the plan and of even cuts."""

from collections.abc import Sequence

import msgspec

from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.direction import Direction
from accept_mpi.errors import counted
from accept_mpi.job import Job
from accept_mpi.pipeline.deal import Deal, widths
from accept_mpi.pipeline.schedule import actions, max_in_flight
from accept_mpi.plan import Lanes, Plan, with_lanes
from accept_mpi.planning.codec_choice import EXACT
from accept_mpi.planning.estimate import Estimate, estimate, fits, least_seconds
from accept_mpi.planning.lane_model import Pipeline, beside_gain, best_share, exponent_of
from accept_mpi.planning.memory import memory_of
from accept_mpi.planning.ties import parted
from accept_mpi.profiling.cluster_profile import ClusterProfile


def table(cluster: ClusterProfile, job: Job, found: Estimate, even: Estimate) -> list[str]:
    """A plan as lines of text: the table of its stages (``stage_table``), then what to expect of it (``verdict``)."""
    return [*stage_table(cluster, found, micro_batches_of(job)), *verdict(cluster, job, found, even)]


def stage_table(cluster: ClusterProfile, found: Estimate, micro_batches: int) -> list[str]:
    """A plan's devices as lines of text, one per device, with a heading. Times are per micro-batch that it takes."""
    names, groups = cluster.outline.names, found.plan.hybrid
    head = ["stage", "host", "layers", "", *(["micro-batches"] if groups else []), "compute", "busy", "memory"]
    rows = [[*head, "activations ahead", "", "gradients back", ""]]
    for d, (s, rank) in enumerate(found.plan.holders):
        stage = found.plan.stages[s]
        table, member = Deal.of(stage).table(micro_batches), stage.ranks.index(rank)
        lanes = stage.lanes_of(rank)
        beside = "" if lanes == 1 else f", {lanes} lanes" if isinstance(lanes, int) else f", {lanes}"
        row = [str(s), f"{cluster.devices[rank].host} (rank {rank}{beside})"]
        if member:
            row += ["", ""]
        else:
            row += [f"{stage.start}..{stage.stop - 1}", f"{names[stage.start]} .. {names[stage.stop - 1]}"]
        row += [f"{table.count(member)} of {micro_batches}"] if groups else []
        row += [f"{1e3 * found.computes[d]:.1f} ms", f"{100 * found.busy[d]:.0f} %", f"{found.memory[d] / 2**20:.0f} MiB"]
        for way in Direction if not member else ():
            if (s, way) in found.choices:
                choice = found.choices[s, way]
                row += [choice.name, f"{1e3 * choice.seconds:.1f} ms"]
        rows.append([*row, *[""] * (len(rows[0]) - len(row))])
    return aligned(rows)


def verdict(cluster: ClusterProfile, job: Job, found: Estimate, even: Estimate) -> list[str]:
    """Lines that say which devices stay idle, and how long a step should take: with this plan, with even cuts, and at least
    with any plan."""
    idle = [n for n in range(len(cluster.devices)) if found.plan.place(n).idle]
    lines = []
    for why, little in (("they have no memory for any stage", True), ("using them would save little or no time", False)):
        names = [f"{cluster.devices[n].host} (rank {n})" for n in idle if (cluster.devices[n].memory <= 0) is little]
        lines += [f"left idle, since {why}: {', '.join(names)}"] if names else []
    if len(cluster.devices) > 1:
        apart = [one for one, _ in parted(cluster.outline.shared, found.plan)]
        for one in cluster.outline.shared:
            if one in apart:
                lines.append(f"{one.text}, whose gradients are added up in every step")
            elif not one.constant:
                lines.append(f"{one.text}, so they are in one stage")
    if again := [str(s) for s, stage in enumerate(found.plan.stages) if stage.recompute]:
        lines.append(f"to save memory, backwards compute their forwards again on stage {', '.join(again)}")
    if found.plan.slack < job.pipeline.slack:
        needed = memory_of(cluster, job, msgspec.structs.replace(found.plan, slack=job.pipeline.slack))
        roomy = fits(cluster, msgspec.structs.replace(found, memory=needed))
        gain = "so weights are newer" if job.pipeline.schedule == "1f1b-async" else "which is faster here"
        why = gain if roomy else "to save memory"
        lines.append(f"stages have few micro-batches in flight (transfer_slack {found.plan.slack}), {why}")
    lines += weights_age(found.plan, job)
    if found.plan.gradients:
        way = {EXACT: "exactly, as one process does", "none": "as each rank's sum, uncoded"}
        text = way.get(found.plan.gradients, f"as {found.plan.gradients}")
        lines.append(f"ranks of a stage exchange their gradients {text}")
    if job.pipeline.schedule == "1f1b-delayed":
        wide, most = widths(found.plan.stages), micro_batches_of(job) + 1  # with a step's first F
        wanted = max_in_flight("1f1b", 0, len(wide), 1 << 30, found.plan.slack, wide)
        if wanted > most:
            lines.append(
                f"1f1b-delayed begins a step with at most {most} micro-batches in flight, where {wanted} would hide "
                "transfers: more and smaller ones (train.micro_batches) may be faster"
            )
    lines.append(
        f"a step should take {1e3 * found.step:.0f} ms ({job.train.batch_size / found.step:.1f} samples/s); "
        f"with even cuts {1e3 * even.step:.0f} ms ({even.step / found.step:.1f} x); "
        f"if all devices shared every layer at no cost {1e3 * least_seconds(cluster, job):.0f} ms"
    )
    return lines


def weights_age(plan: Plan, job: Job) -> list[str]:
    """A line on how many updates older the weights are, on each stage, than in a synchronous schedule: those of
    ``1f1b-async``. None if they are as new, and for other schedules."""
    ages = [_most_late(plan, job, s) for s in range(len(plan.stages))] if job.pipeline.schedule == "1f1b-async" else []
    if not any(ages):
        return []
    if job.pipeline.vertical_sync:
        return [f"weights are up to {counted(max(ages), 'update')} old"]
    older = ", ".join(f"{age} on stage {s}" for s, age in enumerate(ages) if age)
    newest = ", ".join(str(s) for s, age in enumerate(ages) if not age)
    return [f"weights are at most this many updates old: {older}; the newest on stage {newest}"]


def _most_late(plan: Plan, job: Job, stage: int) -> int:
    """Most updates by which weights of ``1f1b-async`` are older, on a stage, than in a synchronous schedule."""
    wide, count = widths(plan.stages), micro_batches_of(job)
    steps = 3 + (max_in_flight("1f1b-async", 0, len(wide), 1 << 30, plan.slack, wide) + max(wide)) // count
    walk = actions("1f1b-async", stage, len(wide), [count] * steps, plan.slack, job.pipeline.vertical_sync, wide)
    return max(action.step - action.version for action in walk if action.kind == "F")


def lanes_table(cluster: ClusterProfile, job: Job, found: Estimate) -> list[str]:
    """Lines on what lanes would give each device of a plan, and the whole: micro-batches side by side as measured, and
    forwards beside backwards by the closed form (``lane_model``, ICPADS 2022), which assumes divisible cores."""
    counts = sorted({k for device in cluster.devices for k in device.lanes})
    rows = [["stage", "host", *(f"{k} lanes" for k in counts), "g", "F beside B", "share of F"]]
    for s, rank in found.plan.holders:
        device, stage = cluster.devices[rank], found.plan.stages[s]
        row = [str(s), f"{device.host} (rank {rank})"]
        row += [f"{1 / device.lanes[k]:.2f} x" if k in device.lanes else "" for k in counts]
        if device.lanes:
            k = max(device.lanes)
            g = exponent_of(k, device.lanes[k])
            forward, backward = (sum(each[stage.start : stage.stop]) for each in (device.forward, device.backward))
            count = len(found.plan.stages)
            share = best_share(Pipeline(forward, backward, count, micro_batches_of(job)))
            row += [f"{g:.2f}", f"{beside_gain(forward, backward, g):.2f} x", f"{share:.2f}"]
        rows.append([*row, *[""] * (len(rows[0]) - len(row))])
    if not counts:
        return ["no device has threads for lanes, or their gain was not measured (pipeline.lanes)"]
    lines = aligned(rows)
    lines.append("(times as fast as one action after another; passes on a share x of a device take x^-g of their time)")
    steps = []
    for lanes in (1, *counts):
        each: dict[int, Lanes] = {rank: lanes for _, rank in found.plan.holders if lanes in cluster.devices[rank].lanes}
        other = estimate(cluster, job, with_lanes(found.plan, each))
        room = "" if fits(cluster, other) else ", which needs more memory than there is"
        steps.append(f"{f'{lanes} lanes' if lanes > 1 else 'in turn'} {1e3 * other.step:.0f} ms{room}")
    return [*lines, f"a step of this plan: {'; '.join(steps)}"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
