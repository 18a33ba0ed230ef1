"""Accuracy of predicted times of sub-models on unknown devices and models: ours, four simpler methods, AccEPT's network.

Devices are hosts of the lab: share of a core x threads x instruction set, with a memory format. Data are measured here
(--fresh), or taken from data.h5 in this folder, which an earlier run left. Errors are of forward + backward of a sub-model.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from accept_mpi.logs.figures import pyplot
from accept_mpi.prediction.accept_network import DualStream, train_dual_stream
from accept_mpi.prediction.predictor import Predictor
from accept_mpi.prediction.samples import F64, DeviceSamples
from accept_mpi.profiling.layer_times import bit_reversed_order
from harness.baselines import by_capacity, by_layers, by_nearest, by_operations
from harness.devices import MODELS, Gathered, gathered
from harness.experiment import Experiment, run
from harness.store import table

ADAPT = 10  # sub-models of a new device (per model) that adaptation sees
FEW = (3, 5)  # numbers of probes

Method = Callable[[DeviceSamples], F64]
Errors = dict[str, dict[str, float]]
"""Mean absolute percentage errors, by method and by device or model."""

OURS, BARE = "ours", "ours, from the ten probes' totals alone"


def main() -> None:
    torch.set_num_threads(1)
    experiment = Experiment(__file__)
    data = gathered(experiment)
    devices = sorted({one.known.device for one in data})
    by_device: Errors = {}
    adapted, few = [], []
    for device in devices:
        mine = [one.known for one in data if one.known.device == device]
        others = [one.known for one in data if one.known.device != device]
        ours = Predictor.train(others)
        methods = simpler(others) | {"two streams (AccEPT; reconstruction)": two_streams(others)} | both(ours)
        for method, predict in methods.items():
            by_device.setdefault(method, {})[device] = error(predict, mine)
        adapted.append(adaptation(ours, mine, others))
        few.append(fewer(ours, mine))
        print(f"{device}: {by_device[OURS][device]:.1f} %", flush=True)
    by_model: Errors = {}
    for name in MODELS:
        mine = [one.known for one in data if one.model == name]
        others = [one.known for one in data if one.model != name]
        kept = ("FLOPs, one rate a device", "sum of its own layers (PipeDream)")
        methods = {key: way for key, way in simpler(others).items() if key in kept} | both(Predictor.train(others))
        for method, predict in methods.items():
            by_model.setdefault(method, {})[name] = error(predict, mine)
        print(f"{name}: {by_model[OURS][name]:.1f} %", flush=True)
    text = tables(data, by_device, by_model, np.array(adapted), np.array(few))
    draw(experiment, by_device)
    experiment.finish(text)


def simpler(others: Sequence[DeviceSamples]) -> dict[str, Method]:
    """The simpler methods, which predict a device's ``intervals`` from its probes and the same model on other devices."""

    def alike(known: DeviceSamples) -> list[DeviceSamples]:
        return [other for other in others if other.model == known.model]

    return {
        "FLOPs, one rate a device": lambda known: by_operations(known, known.intervals),
        "one reference, capacity ratio (FTPipeHD)": lambda known: by_capacity(
            known, max(alike(known), key=lambda other: other.device), known.intervals
        ),
        "nearest known device": lambda known: by_nearest(known, alike(known), known.intervals),
        "sum of its own layers (PipeDream)": lambda known: by_layers(known, known.intervals),
    }


def both(predictor: Predictor) -> dict[str, Method]:
    """Our method, with the device's layer times from its probes and without them."""
    return {
        BARE: lambda known: predictor.predict(replace(known, layer_times=None), known.intervals)[0],
        OURS: lambda known: predictor.predict(known, known.intervals)[0],
    }


def two_streams(others: Sequence[DeviceSamples]) -> Method:
    """AccEPT's network, trained on ``others``."""
    network: DualStream = train_dual_stream(others)

    @torch.no_grad()
    def predict(known: DeviceSamples) -> F64:
        return network(known, known.intervals).exp().double().numpy()  # type: ignore[no-any-return]

    return predict


def error(predict: Method, some: Sequence[DeviceSamples]) -> float:
    """Mean absolute percentage error of forward + backward over all intervals of ``some``."""
    off = [np.abs(predict(known).sum(axis=1) / known.times.sum(axis=1) - 1) for known in some]
    return 100 * float(np.concatenate(off).mean())


def adaptation(ours: Predictor, mine: list[DeviceSamples], old: list[DeviceSamples]) -> list[float]:
    """Errors before and after adaptation to a device: on its sub-models that adaptation did not see, and on old devices."""
    fresh, rest = [], []
    for known in mine:
        seen = np.random.default_rng(1).permutation(len(known.intervals)) < ADAPT
        for into, chosen in ((fresh, seen), (rest, ~seen)):
            into.append(replace(known, intervals=known.intervals[chosen], times=known.times[chosen]))
    after = ours
    for known in fresh:
        after = after.adapt(known)
    return [error(both(one)[OURS], some) for some in (rest, old[::7]) for one in (ours, after)]


def fewer(ours: Predictor, mine: list[DeviceSamples]) -> list[list[float]]:
    """(FEW, 3) errors with few probes: those that the networks ask for, those spread over the model, the first ones."""
    rows = []
    for count in FEW:
        some: list[list[DeviceSamples]] = [[], [], []]
        for known in mine:
            total = len(known.probes)
            for into, order in zip(
                some, (ours.order(known.outline, known.probes), bit_reversed_order(total), range(total)), strict=True
            ):
                into.append(known.only(list(order)[:count]))
        rows.append([error(both(ours)[OURS], one) for one in some])
    return rows


def tables(data: list[Gathered], by_device: Errors, by_model: Errors, adapted: F64, few: F64) -> str:
    """The report in Markdown."""
    rows = []
    for method, errors in by_device.items():
        each, models = np.array(list(errors.values())), list(by_model.get(method, {}).values())
        rows.append([method, float(np.median(each)), float(each.max()), *([max(models)] if models else [""])])
    head = ["mean absolute percentage error", "device never seen, median", "worst device", "model never seen, worst model"]
    passes = np.concatenate([one.passes for one in data])
    again = 100 * np.abs(passes[:, 1] / passes[:, 0] - 1).mean()
    devices, count = {one.known.device for one in data}, sum(len(one.known.intervals) for one in data)
    model_rows = [[name, *(errors[name] for errors in by_model.values())] for name in MODELS]
    before, after, old_before, old_after = adapted.mean(axis=0)
    few_rows = [[f"{n}", *row] for n, row in zip(FEW, few.mean(axis=0).tolist(), strict=True)]
    asked = ["probes", "asked for by the networks' doubt", "spread over the model", "the first ones"]
    return "\n\n".join([
        f"{len(devices)} devices, {len(MODELS)} models, {count} sub-models, each measured twice: the second time "
        f"differs from the first by {again:.1f} % in the mean.",
        table(head, rows),
        table(["model never seen", *by_model], model_rows),
        f"After {ADAPT} sub-models a model observed on the new device: {before:.1f} % to {after:.1f} % on the others; "
        f"on the devices known before: {old_before:.1f} % to {old_after:.1f} %.",
        "Ours with fewer probes, which then do not cover the model:",
        table(asked, few_rows),
    ]) + "\n"  # fmt: skip


def draw(experiment: Experiment, by_device: Errors) -> None:
    """Plot the cumulative share of devices over the error, one line per method."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for method, errors in by_device.items():
        each = np.sort(list(errors.values()))
        axes.plot(each, (np.arange(len(each)) + 1) / len(each), label=method, linewidth=2.5 if method == OURS else 1.3)
    axes.axvline(5, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_xticks(ticks := [3, 5, 10, 20, 50], [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("mean absolute error of a device never seen, %")
    axes.set_ylabel("share of devices")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(experiment.out / "plot.png", dpi=110)


run(main)
