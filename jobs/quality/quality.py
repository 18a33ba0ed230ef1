"""Run under mpirun by quality.sh: train every model with every codec and seed that is missing, then table and plot."""

import statistics
import sys
from pathlib import Path

from accept_mpi import config
from accept_mpi.comm.runtime import Runtime
from accept_mpi.errors import UserError
from accept_mpi.figures import pyplot
from accept_mpi.log import open_log
from accept_mpi.run import Options, train

HERE, OUT = Path(__file__).parent, Path("runs/quality")
SEEDS = {"cnn": 5, "mobilenetv2": 5, "gpt": 3}
# Activations, gradients. AccEPT sends activations by multi-bit quantization, gradients by stochastic uniform quantization.
CODECS = (
    ("none", "none"),
    ("uniform:4", "uniform:4"),
    ("mbq:4", "uniform:4"),
    ("uniform:2", "uniform:2"),
    ("mbq:2", "uniform:2"),
    ("uniform:1", "uniform:4"),
    ("mbq:1", "uniform:4"),
    ("uniform:2/0", "uniform:2/0"),
    ("mbq:2/0", "uniform:2/0"),
)


def directory(model: str, codecs: tuple[str, str], seed: int) -> Path:
    """Where one run's results lie."""
    name = "-".join(codecs).replace(":", "").replace("/", "g")
    return OUT / model / f"{name}-seed{seed}"


def keys(model: str, codecs: tuple[str, str], seed: int) -> tuple[str, ...]:
    """What one run changes in its job file."""
    where = directory(model, codecs, seed)
    changed = {"pipeline.forward": codecs[0], "pipeline.backward": codecs[1], "train.seed": seed, "output.directory": where}
    return tuple(f"{key}={value}" for key, value in changed.items())


def result(model: str, codecs: tuple[str, str], seed: int) -> float | None:
    """Final test accuracy in percent, or for text the validation loss; None where this very job is not finished."""
    job = config.parse((HERE / f"{model}.toml").read_text(), model, keys(model, codecs, seed))
    try:
        with open_log(directory(model, codecs, seed) / "log.h5") as log:
            finished = any(text.startswith(b"done") for text in log["events"]["text"])
            if not finished or log.attrs["job"] != job.to_json():
                return None
            last = log["evals"][-1]
    except UserError:
        return None
    return float(last["loss"]) if model == "gpt" else 100 * float(last["accuracy"])


def results(model: str, codecs: tuple[str, str]) -> list[float]:
    """Of all seeds."""
    found = [result(model, codecs, seed) for seed in range(SEEDS[model])]
    return [value for value in found if value is not None]


def table(models: list[str]) -> str:
    """Markdown: means over seeds, differences from no codec, and the spread of single runs."""
    lines = ["| activations | gradients | " + " | ".join(models) + " |", "| --- | --- |" + " --- |" * len(models)]
    for codecs in CODECS:
        cells = []
        for model in models:
            plain, values = statistics.fmean(results(model, CODECS[0])), results(model, codecs)
            mean = statistics.fmean(values)
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            if model == "gpt":
                cells.append(f"{mean:.4f} ± {spread:.4f} ({100 * (mean / plain - 1):+.2f} %)")
            else:
                cells.append(f"{mean:.2f} ± {spread:.2f} ({mean - plain:+.2f})")
        lines.append(f"| {codecs[0]} | {codecs[1]} | " + " | ".join(cells) + " |")
    seeds = ", ".join(f"{SEEDS[model]} ({model})" for model in models)
    units = "Test accuracy in percent (difference in points); gpt: validation loss (difference in percent)."
    return "\n".join([*lines, "", f"{units} Mean over {seeds} seeds, ± one standard deviation of single runs.", ""])


def draw(models: list[str]) -> None:
    """One panel a model: every run a dot, the mean a bar."""
    plt = pyplot()
    figure, panels = plt.subplots(1, len(models), figsize=(5 * len(models), 4.2), layout="constrained", squeeze=False)
    for axes, model in zip(panels[0], models, strict=True):
        for y, codecs in enumerate(CODECS):
            values = results(model, codecs)
            axes.plot(values, [y] * len(values), "o", color="#56B4E9", markersize=5, alpha=0.8)
            axes.plot([statistics.fmean(values)] * 2, [y - 0.3, y + 0.3], color="#D55E00", linewidth=2.5)
        plain = statistics.fmean(results(model, CODECS[0]))
        axes.axvline(plain, color="#999999", linewidth=0.8, zorder=0)
        names = [" / ".join(codecs) for codecs in CODECS]
        axes.set_yticks(range(len(CODECS)), names if axes is panels[0][0] else [""] * len(CODECS))
        axes.invert_yaxis()
        axes.set_title(model)
        axes.set_xlabel("validation loss" if model == "gpt" else "test accuracy, %")
    figure.suptitle("Codecs of activations / gradients (dots: seeds; bars: means)")
    figure.savefig(OUT / "quality.png", dpi=110)


def main() -> None:
    """Train what is missing, then table and plot on rank 0."""
    models = sys.argv[1:] or list(SEEDS)
    runtime = Runtime()
    try:
        missing = [
            (model, codecs, seed)
            for model in models
            for seed in range(SEEDS[model])
            for codecs in CODECS
            if result(model, codecs, seed) is None
        ]
        # Rank 0 alone knows what is finished once hosts have disks of their own.
        missing = runtime.messenger.broadcast(missing, runtime.startup_seconds, "what is to be run")
        for number, (model, codecs, seed) in enumerate(missing, 1):
            if runtime.rank == 0:
                print(f"{number}/{len(missing)}: {directory(model, codecs, seed)}", flush=True)
            train(runtime, Options(HERE / f"{model}.toml", keys(model, codecs, seed), quiet=True))
        if runtime.rank == 0:
            OUT.mkdir(parents=True, exist_ok=True)
            (OUT / "table.md").write_text(table(models))
            draw(models)
            print(table(models) + f"\n{OUT / 'table.md'}, {OUT / 'quality.png'}")
    except BaseException as error:
        runtime.fail(error)
    runtime.finish(0)


main()
