"""How well sub-models' times are predicted on devices and models never seen, against four simpler ways and AccEPT's network.

Devices: share of a core x threads x instruction set x memory format, each a host of the lab. Data are measured here
(--fresh), or taken from data.h5 beside this file, which a run left. Errors are of forward + backward of a sub-model.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from accept_mpi.figures import pyplot
from accept_mpi.predictor import (
    DualStream,
    Known,
    Predictor,
    by_capacity,
    by_layers,
    by_nearest,
    by_operations,
    train_dual_stream,
)
from harness.devices import MODELS, gathered
from harness.experiment import Experiment, run
from harness.store import table

ADAPT = 10  # of them, that adaptation sees

Floats = npt.NDArray[np.float64]
Method = Callable[[Known, Sequence[tuple[Known, Floats]]], Floats]


def main() -> None:
    torch.set_num_threads(1)
    experiment = Experiment(__file__)
    data = gathered(experiment)
    report(experiment, data)


# -- methods: what they say of known.intervals, from its probes and from other devices or models ---------------------------


def _capacity(known: Known, others: Sequence[tuple[Known, Floats]]) -> Floats:
    reference = max(others, key=lambda pair: pair[0].device)  # one fixed device
    return by_capacity(known, *reference, known.intervals)


BASELINES: dict[str, Method] = {
    "FLOPs, one rate a device": lambda known, others: by_operations(known, known.intervals),
    "one reference, capacity ratio (FTPipeHD)": _capacity,
    "nearest known device": lambda known, others: by_nearest(known, others, known.intervals),
}


def error(predicted: Floats, known: Known) -> Floats:
    """Relative errors of forward + backward."""
    return np.abs(predicted.sum(axis=1) / known.times.sum(axis=1) - 1)


def report(experiment: Experiment, data: list[tuple[str, Known, Floats]]) -> None:
    devices = sorted({known.device for _, known, _ in data})
    by_device: dict[str, dict[str, float]] = {}
    by_model: dict[str, dict[str, float]] = {}

    def note(into: dict[str, dict[str, float]], method: str, what: str, errors: list[Floats]) -> None:
        into.setdefault(method, {})[what] = 100 * float(np.concatenate(errors).mean())

    adapted: list[list[float]] = []
    for device in devices:
        mine = [(name, known, layers) for name, known, layers in data if known.device == device]
        others = [(name, known, layers) for name, known, layers in data if known.device != device]
        for method, predict in BASELINES.items():
            errors = [error(predict(k, [(o, x) for n, o, x in others if n == name]), k) for name, k, _ in mine]
            note(by_device, method, device, errors)
        note(
            by_device, "sum of its own layers (PipeDream)", device, [error(by_layers(x, k.intervals), k) for _, k, x in mine]
        )
        dual = train_dual_stream([known for _, known, _ in others])
        note(by_device, "two streams (AccEPT; reconstruction)", device, [error(_dual(dual, k), k) for _, k, _ in mine])
        ours = Predictor.train([known for _, known, _ in others])
        note(by_device, "ours", device, [error(ours.predict(k, k.intervals)[0], k) for _, k, _ in mine])
        adapted.append(adaptation(ours, [k for _, k, _ in mine], [k for _, k, _ in others]))
        print(f"{device}: {by_device['ours'][device]:.1f} %", flush=True)
    for name in MODELS:
        mine = [(n, known, layers) for n, known, layers in data if n == name]
        others = [(n, known, layers) for n, known, layers in data if n != name]
        note(by_model, "FLOPs, one rate a device", name, [error(by_operations(k, k.intervals), k) for _, k, _ in mine])
        note(by_model, "sum of its own layers (PipeDream)", name, [error(by_layers(x, k.intervals), k) for _, k, x in mine])
        ours = Predictor.train([known for _, known, _ in others])
        note(by_model, "ours", name, [error(ours.predict(k, k.intervals)[0], k) for _, k, _ in mine])
        print(f"{name}: {by_model['ours'][name]:.1f} %", flush=True)
    write(experiment, data, by_device, by_model, np.array(adapted))


@torch.no_grad()
def _dual(network: DualStream, known: Known) -> Floats:
    return network(known, known.intervals).exp().double().numpy()  # type: ignore[no-any-return]


def adaptation(ours: Predictor, mine: list[Known], old: list[Known]) -> list[float]:
    """Errors in % on what adaptation has not seen of a device, before and after; and on old devices, before and after."""
    fresh, rest = [], []
    for known in mine:
        seen = np.random.default_rng(1).permutation(len(known.intervals)) < ADAPT
        for into, chosen in ((fresh, seen), (rest, ~seen)):
            into.append(
                Known(
                    known.outline,
                    known.device,
                    known.probes,
                    known.probe_times,
                    known.intervals[chosen],
                    known.times[chosen],
                )
            )
    after = ours
    for known in fresh:
        after = after.adapt(known)
    return [
        100 * float(np.concatenate([error(predictor.predict(k, k.intervals)[0], k) for k in some]).mean())
        for some in (rest, old[::7]) for predictor in (ours, after)
    ]  # fmt: skip


def write(
    experiment: Experiment, data: list[tuple[str, Known, Floats]], by_device: dict[str, dict[str, float]],
    by_model: dict[str, dict[str, float]], adapted: Floats,
) -> None:  # fmt: skip
    """Table and plot."""
    rows = []
    for method, errors in by_device.items():
        each = np.array(list(errors.values()))
        models = list(by_model.get(method, {}).values())
        rows.append([method, float(np.median(each)), float(each.max()), *([max(models)] if models else [""])])
    head = ["mean absolute percentage error", "device never seen, median", "worst device", "model never seen, worst model"]
    count = sum(len(known.intervals) for _, known, _ in data)
    text = f"{len({k.device for _, k, _ in data})} devices, {len(MODELS)} models, {count} sub-models measured.\n\n"
    text += table(head, rows)
    model_rows = [[name, *(errors[name] for errors in by_model.values())] for name in MODELS]
    text += "\n\n" + table(["model never seen", *by_model], model_rows)
    before, after, old_before, old_after = adapted.mean(axis=0)
    text += (
        f"\n\nAfter {ADAPT} sub-models a model observed on the new device: {before:.1f} % to {after:.1f} % on the others; "
        f"on the devices known before: {old_before:.1f} % to {old_after:.1f} %.\n"
    )
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for method, errors in by_device.items():
        each = np.sort(list(errors.values()))
        axes.plot(each, (np.arange(len(each)) + 1) / len(each), label=method, linewidth=2.5 if method == "ours" else 1.3)
    axes.axvline(5, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("mean absolute error of a device never seen, %")
    axes.set_ylabel("share of devices")
    axes.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(experiment.out / "plot.png", dpi=110)
    experiment.finish(text)


run(main)
