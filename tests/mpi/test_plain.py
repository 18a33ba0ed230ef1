"""Whatever a user's model, data set or loss does: any number of ranks and any synchronous schedule compute what a plain
PyTorch loop over the same micro-batches computes, bit for bit; the asynchronous one does on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import differences, plain_loop

from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint

JOB = """
[model]
name = "nets:{model}"
args = {args}
[data]
name = "nets:{data}"
[train]
batch_size = 8
micro_batches = {micro}
steps = 5
evaluate_every = 1
loss = "{loss}"
optimizer = {{ name = "sgd", lr = 0.1, momentum = 0.9, weight_decay = 0.01 }}
[pipeline]
cuts = "even"
[output]
directory = "run"
"""
SYNCHRONOUS = ("1f1b", "zero-bubble")
EVERY = ("gpipe", "1f1b", "zero-bubble", "1f1b-async")

Case = tuple[str, str, dict[str, Any]]
"""A model, its argument ("" for none), and what differs from the usual job."""

CASES: list[Case] = [
    ("frozen_norm", "", {}),
    *(("recomputed", mode, {"micro": 4}) for mode in ("reentrant", "other")),
    *(("writing", how, {"micro": 4}) for how in ("clamp", "data", "new data", "shrink")),
    *(("hooked", how, {"micro": 4}) for how in ("built", "functions", "module", "parameter")),
    *(("hooked", how, {"micro": 4}) for how in ("accumulated", "forward", "backward")),
    *(("twice", kind, {"micro": 4}) for kind in ("linear", "convolution")),
    *(("normed", kind, {}) for kind in ("old", "functions", "new", "spectral", "old spectral")),
    *(("first_seen", kind, {}) for kind in ("none", "transient", "replaced", "made", "attribute", "buffer")),
    *(
        ("handing", kind, {})
        for kind in (
            "dict", "ordered", "none", "flag", "varying", "sometimes", "cells", "point", "record", "same", "array", "lone",
            "no gradient",
        )
    ),
    *(("outside", kind, {"micro": 4}) for kind in ("merging", "hook", "buffer", "attribute", "conjugate")),
    *(("outside", kind, {"micro": 4}) for kind in ("functional", "mapped", "beside", "gradient", "of weights", "knowing")),
    *(("referring", kind, {"micro": 4}) for kind in ("attribute", "list", "view", "module", "values", "given")),
    ("heads", "", {"loss": "nets:both"}),
    ("drawing", "", {}),
    *(("weighted_classes", "", {"data": f"mirrored:{rng}"}) for rng in ("torch", "numpy", "python")),
]  # fmt: skip
ARGUMENTS = {"recomputed": "mode", "writing": "how", "hooked": "how"}


def write(folder: Path, number: int, case: Case) -> Path:
    model, kind, more = case
    data, _, rng = more.get("data", "pairs").partition(":")
    text = JOB.format(
        model=model,
        args=f'{{ {ARGUMENTS.get(model, "kind")} = "{kind}" }}' if kind else "{}",
        data=data,
        micro=more.get("micro", 2),
        loss=more.get("loss", "cross_entropy"),
    )
    if rng:
        text = text.replace("[train]", f'args = {{ rng = "{rng}" }}\n[train]')
    path = folder / f"{number}.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the plain loop makes of each case."""
    folder = tmp_path_factory.mktemp("plain")
    return [plain_loop(write(folder, number, case))[0] for number, case in enumerate(CASES)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equals_the_plain_loop(trained, plain: list[dict[str, Any]], tmp_path: Path, ranks: int) -> None:
    jobs, runs = [], []
    for number, case in enumerate(CASES):
        if (case[0] == "handing" and ranks > 2) or (case[0] == "referring" and ranks > 1):
            continue
        path = write(tmp_path, number, case)
        schedules = EVERY if ranks == 1 else SYNCHRONOUS
        if ranks == 3:  # a job takes a second there, and each schedule has met the case on two ranks
            schedules = (schedules[number % len(schedules)],)
        for schedule in schedules:
            run = f"{number}-{schedule}"
            jobs.append((path, f"pipeline.schedule={schedule}", f"output.directory={run}"))
            runs.append((number, schedule, tmp_path / run))
        if ranks == 2 and case[1] in ("knowing", "beside"):
            jobs.append((path, "pipeline.lanes=2", "train.threads=2", f"output.directory={number}-lanes"))
            runs.append((number, "lanes", tmp_path / f"{number}-lanes"))
    trained(ranks, tmp_path, jobs)
    wrong = {}
    for number, schedule, run in runs:
        if found := differences(Checkpoint(run).whole(), plain[number]):
            wrong[f"{CASES[number][:2]} {schedule}"] = found
    assert not wrong


def test_measuring_leaves_no_trace(trained, tmp_path: Path) -> None:
    """In the caches and counters of a user's Python modules."""
    for number, kind in enumerate(("table", "global")):
        path = write(tmp_path, number, ("outside", kind, {}))
        expected, _ = plain_loop(path, "train.steps=3")
        measured = ("pipeline.cuts=auto", "pipeline.probe_seconds=0.1", "pipeline.latency_db=none")
        steps = ("train.steps=3", "train.evaluate_every=0", f"output.directory={kind}")
        trained(1 if kind == "global" else 2, tmp_path, [(path, *steps, *measured)])
        assert not differences(Checkpoint(tmp_path / kind).whole(), expected), kind


def losses(run: Path) -> list[float]:
    with open_log(run / "log.h5") as log:
        return [float(loss) for loss in log["steps"]["loss"]]


KEPT = [case for case in CASES if case[0] in ("first_seen", "frozen_norm", "writing", "normed")]


def test_resuming_goes_on_as_if_nothing_had_been(trained, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    """State of every kind is in a checkpoint: buffers made, replaced or resized in forward, extra state, modes, versions."""
    paths = [write(tmp_path, CASES.index(case), case) for case in KEPT]
    runs = {path: tmp_path / f"first-{path.stem}" for path in paths}
    trained(2, tmp_path, [(path, "train.steps=3", f"output.directory={run}") for path, run in runs.items()])
    again = [(path, f"output.directory=second-{path.stem}", "--resume", str(run)) for path, run in runs.items()]
    trained(1, tmp_path, again)
    wrong = {}
    for case, path in zip(KEPT, paths, strict=True):
        if found := differences(Checkpoint(tmp_path / f"second-{path.stem}").whole(), plain[CASES.index(case)]):
            wrong[case[:2]] = found
    assert not wrong


def test_asynchronous_versions_are_true_in_backward_too(trained, tmp_path: Path) -> None:
    """What is recomputed in backward meets the weights of its forward; hooks on parameters run; what a forward writes
    stays."""
    cases: dict[str, Case] = {
        **{mode: ("recomputed", mode, {"micro": 4}) for mode in ("no", "reentrant", "other")},
        **{how: ("hooked", how, {"micro": 4}) for how in ("built", "functions")},
        **{how: ("writing", how, {"micro": 4}) for how in ("clamp", "data", "new data")},
    }
    jobs, asynchronous = [], "pipeline.schedule=1f1b-async"
    for number, (name, case) in enumerate(cases.items()):
        path = write(tmp_path, number, case)
        for sync in ("false", "true") if case[0] == "recomputed" else ("false",):
            vertical = f"pipeline.vertical_sync={sync}"
            jobs.append((path, asynchronous, vertical, f"output.directory={name}-{sync}", "train.evaluate_every=0"))
    trained(3, tmp_path, jobs)
    for sync in ("false", "true"):
        expected = Checkpoint(tmp_path / f"no-{sync}").whole()
        for mode in ("reentrant", "other"):
            assert not differences(Checkpoint(tmp_path / f"{mode}-{sync}").whole(), expected), (mode, sync)
    runs = {name: Checkpoint(tmp_path / f"{name}-false").whole() for name in cases}
    for how, number in (("built", 3), ("functions", 4)):
        for name, value in plain_loop(tmp_path / f"{number}.toml")[0].items():
            if name.endswith("weight"):  # pruned rows have no gradient, only weight decay, whatever is stale
                assert torch.equal(runs[how][name][::2], value[::2]), (how, name)
    for how in ("clamp", "data", "new data"):
        # The last update comes after the last forward: nobody has clamped what that added.
        assert float(runs[how]["0.weight"].abs().max()) < 0.2 + 0.1
    assert not differences(runs["data"], runs["clamp"])
    assert not differences(runs["new data"], runs["clamp"])


def test_what_writes_to_weights_of_an_older_version_is_refused(trained, tmp_path: Path) -> None:
    path = write(tmp_path, 0, ("writing", "clamp", {}))
    (done,) = trained(2, tmp_path, [(path, "pipeline.schedule=1f1b-async", "pipeline.vertical_sync=true")], code=2)
    assert "writes into its own parameters" in done.out


def test_lengths_may_differ(trained, tmp_path: Path) -> None:
    """From micro-batch to micro-batch, longer than any seen before, coded and uncoded, measured and given cuts."""
    case: Case = ("tokens", "", {"data": "padded", "micro": 4})
    path = write(tmp_path, 0, case)
    expected, plain_losses = plain_loop(path)
    jobs = [(path, f"pipeline.schedule={schedule}", f"output.directory={schedule}") for schedule in EVERY]
    coded = ("pipeline.forward=uniform:8", "pipeline.backward=bf16", "output.directory=coded")
    measured = ("pipeline.cuts=auto", "pipeline.probe_seconds=0.2", "pipeline.latency_db=none", "output.directory=measured")
    trained(2, tmp_path, [*jobs, (path, *coded), (path, *measured)])
    trained(3, tmp_path, [(path, "output.directory=three", "pipeline.schedule=zero-bubble")])
    trained(1, tmp_path, [(path, "output.directory=one")])
    whole, _ = plain_loop(path, whole=True)
    reference = Checkpoint(tmp_path / "one").whole()
    for run in ("gpipe", "1f1b", "zero-bubble", "measured", "three"):
        assert not differences(Checkpoint(tmp_path / run).whole(), reference), run
    for name, value in reference.items():
        assert torch.allclose(value, whole[name], atol=1e-5), "a step is a mean over its targets"
        assert torch.allclose(Checkpoint(tmp_path / "coded").whole()[name], value, atol=0.02)
    assert max(abs(a - b) for a, b in zip(losses(tmp_path / "1f1b"), losses(tmp_path / "one"), strict=True)) == 0.0
    del expected, plain_losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_a_mean_over_what_counts(trained, tmp_path: Path, ranks: int) -> None:
    """Padding, weights and masks, whatever the micro-batches: as one forward of the whole batch."""
    cases: dict[str, Case] = {
        "padding": ("tokens", "", {"data": "ignored", "micro": 4}),
        "sums": ("tokens", "", {"data": "ignored", "micro": 4, "loss": "nets:sums"}),
        "weights": ("weighted_classes", "", {"loss": "nets:weighted", "micro": 4}),
        "masks": ("weighted_classes", "", {"data": "masked", "loss": "nets:masked_loss", "micro": 8}),
    }
    jobs = []
    for number, (name, case) in enumerate(cases.items()):
        path = write(tmp_path, number, case)
        for schedule in SYNCHRONOUS if ranks > 1 else ("1f1b",):
            jobs.append((path, f"pipeline.schedule={schedule}", f"output.directory={name}-{schedule}"))
    trained(ranks, tmp_path, jobs)
    for path, _, directory in jobs:
        run = tmp_path / directory.partition("=")[2]
        expected, expected_losses = plain_loop(path, whole=True)
        found = Checkpoint(run).whole()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-5), (run.name, name)
        assert losses(run) == pytest.approx(expected_losses, abs=1e-5), run.name


def test_padding_alone_is_no_nan_and_no_miss(trained, tmp_path: Path) -> None:
    base = write(tmp_path, 0, ("tokens", "", {"data": "ignored", "micro": 8}))
    text = base.read_text()
    for kind in ("empty", "easy"):
        (tmp_path / f"{kind}.toml").write_text(text.replace("[train]", f"args = {{ {kind} = true }}\n[train]"))
    more = ("train.steps=120", "train.optimizer.lr=0.5", "train.optimizer.weight_decay=0.0")
    trained(2, tmp_path, [("empty.toml", "output.directory=empty"), ("easy.toml", *more, "output.directory=easy")])
    trained(1, tmp_path, [("empty.toml", "output.directory=empty1", "train.loss=nets:sums")])
    expected, expected_losses = plain_loop(tmp_path / "empty.toml", whole=True)
    for run in ("empty", "empty1"):
        assert losses(tmp_path / run) == pytest.approx(expected_losses, abs=1e-5)
        for name, value in Checkpoint(tmp_path / run).whole().items():
            assert torch.allclose(value, expected[name], atol=1e-5)
    with open_log(tmp_path / "easy" / "log.h5") as log:
        assert float(log["evals"][-1]["accuracy"]) == 1.0, "accuracy counts what counts"


def test_first_and_last_stage_draw_the_same(trained, tmp_path: Path) -> None:
    path = write(tmp_path, 0, ("weighted_classes", "", {"data": "mirrored:unseeded"}))
    (done,) = trained(2, tmp_path, [path], code=2)
    assert "random numbers" in done.out
    assert "Traceback" not in done.out


def test_what_cannot_cross_or_be_kept_is_said_before_the_first_step(trained, tmp_path: Path) -> None:
    crossing = write(tmp_path, 0, ("unknown", "", {}))
    kept = write(tmp_path, 1, ("unkept", "", {}))
    said = trained(2, tmp_path, [(crossing, "pipeline.cuts=[2]"), kept], code=2)
    assert 'layer 1 "1" gives a nets.Odd, which cannot cross' in said[0].out
    assert (
        'layer "2" cannot be kept in a checkpoint: "_extra_state" of its state_dict() is or holds a nets.Odd' in said[1].out
    )
    trained(1, tmp_path, [crossing])
    for one in said:
        assert "Traceback" not in one.out
        assert "step 1" not in one.out


def test_layers_that_hold_parts_of_each_other_stay_together(trained, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    """A layer with a view of another's weight, in an attribute, a list or a function, is not parted from it; where they are
    together, the asynchronous schedule shows both the same version."""
    jobs = []
    for number, case in enumerate(CASES):
        if case[0] == "referring":
            path = write(tmp_path, number, case)
            apart = ("pipeline.cuts=[2]", f"output.directory={number}-2")
            jobs.append((path, *apart))
    for one in trained(2, tmp_path, jobs, code=2):
        assert 'layers 0 "0" and 4 "4" share a parameter (0.weight, 4.' in one.out
        assert "Traceback" not in one.out
    together = [(path, "pipeline.cuts=[5]", f"output.directory={path.stem}-5") for path, *_ in jobs]
    trained(2, tmp_path, together)
    for path, *_ in jobs:
        assert not differences(Checkpoint(tmp_path / f"{path.stem}-5").whole(), plain[int(path.stem)])


def test_parameters_that_nothing_would_train_are_refused(trained, tmp_path: Path) -> None:
    """Those of a layer in another stage, and those that a loss uses behind the model's back."""
    layer = write(tmp_path, 0, ("referring", "elsewhere", {}))
    loss = write(tmp_path, 1, ("referring", "module", {"loss": "nets:penalty"}))
    for ranks in (1, 2):
        said = trained(ranks, tmp_path, [(job, "pipeline.cuts=[]", "pipeline.ranks=[0]") for job in (layer, loss)], code=2)
        assert "layers 0 to 5: a forward uses a parameter of shape (6, 6) that belongs to none" in said[0].out
        assert 'train.loss: "nets:penalty" uses a parameter of shape' in said[1].out
        for one in said:
            assert "Traceback" not in one.out
            assert "step 1/" not in one.out


def test_no_cut_takes_away_a_part_of_a_derivative(trained, tmp_path: Path) -> None:
    """That a layer takes by what it is given: what else it is given depends on it, too."""
    path = write(tmp_path, 0, ("differentiating", "", {}))
    expected, _ = plain_loop(path)
    (done,) = trained(2, tmp_path, [(path, "pipeline.cuts=[3]")], code=2)
    assert "layer 3: a forward differentiates (torch.autograd.grad) by what an earlier stage gives" in done.out
    assert "Traceback" not in done.out
    for ranks, cuts in ((1, "[]"), (2, "[2]")):
        trained(ranks, tmp_path, [(path, f"pipeline.cuts={cuts}", f"output.directory=cut-{ranks}")])
        assert not differences(Checkpoint(tmp_path / f"cut-{ranks}").whole(), expected)


def test_a_users_bug_is_his_traceback(trained, tmp_path: Path) -> None:
    cases = {
        "scale": (
            ("buggy", "forward", {}),
            ["in _look_up", "return x * table.scale", "'NoneType' object has no attribute 'scale'"],
        ),
        "backward": (("buggy", "backward", {}), ["in _look_up", "the backward of layer", "AttributeError"]),
        "memory": (("buggy", "memory", {}), ["in _look_up", "ran out of memory", "torch.empty(1 << 50)"]),
        "loss": (("buggy", "none", {"loss": "nets:buggy_loss"}), ["in buggy_loss", "KeyError: 'no such class'"]),
        "data": (("buggy", "none", {"data": "buggy_data"}), ["in _read", "a scratch on the disk", "samples "]),
    }
    jobs = [write(tmp_path, number, case) for number, (case, _) in enumerate(cases.values())]
    for ranks in (1, 2):
        for done, (name, (_, wanted)) in zip(trained(ranks, tmp_path, jobs, code=1), cases.items(), strict=True):
            for text in wanted:
                assert text in done.out, (ranks, name, text, done.out)
            assert done.out.count("Traceback") == 1, (ranks, name, done.out)
            assert "users_code.py" not in done.out, (ranks, name, done.out)
            assert "nets.py" in done.out
