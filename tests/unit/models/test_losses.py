"""What of targets counts in torch's losses, and in those that inherit from them."""

import math
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accept_mpi.errors import UserError, UsersBug
from accept_mpi.job_file import parse
from accept_mpi.models.losses import CrossEntropy, Loss, Result, cross_entropy, find_loss, loss_of
from accept_mpi.models.metrics import Metric, metrics_of


class Focal(nn.CrossEntropyLoss):
    """A plain mean over samples."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, weight=self.weight, reduction="none").mean()


def test_mixed_targets_are_classes_again_in_evaluations() -> None:
    """Told before the first step; mse would fail in the first evaluation."""
    text = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\nloss="mse"\n[output]\ndirectory="r"\n'
    text = text.replace("[output]", "mix={classes=3,mixup=0.2}\n[output]")
    assert loss_of(parse(text, "job", ["train.evaluate_every=0"])).name == "mse"
    with pytest.raises(UserError, match=r"^train.mix: evaluations have classes as targets"):
        loss_of(parse(text, "job"))


def test_amounts_have_no_accuracy() -> None:
    """Told before the first step, not in the first evaluation."""
    text = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\nloss="mse"\n[output]\ndirectory="r"\n'
    with pytest.raises(UserError, match=r'"accuracy" makes no sense with train.loss = "mse"'):
        metrics_of(parse(text, "job", ["output.keep_best=accuracy"]))
    for fine in (["output.keep_best=loss"], ["output.keep_best=accuracy", "model.output=loss"]):
        assert metrics_of(parse(text, "job", fine)) == []


def test_a_sum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("summing")
    module.loss = nn.CrossEntropyLoss(reduction="sum")
    monkeypatch.setitem(sys.modules, "summing", module)
    with pytest.raises(UserError, match='reduction="sum"'):
        find_loss("summing:loss")


class Tempered(nn.Module):
    """With a temperature that is to be trained."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output / self.temperature, target)

    def other(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self(output, target)


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    for loss in (Tempered(), Tempered().other):
        with pytest.raises(UserError, match=r'^train.loss: "own" has parameters of its own that are to be trained'):
            Loss("own", loss)
    Loss("own", Tempered(trained=False))


def test_two_losses_are_no_sum_and_count() -> None:
    def adversarial(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return output.mean(), output.square().mean()

    with pytest.raises(UserError, match=r'^train.loss: "own": it gives two values that need gradients'):
        Loss("own", adversarial)(torch.ones(2, requires_grad=True), torch.ones(2), 2)


class Weighted(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__(weight=torch.tensor([1.0, 3.0, 9.0]), ignore_index=2)


class Called(Weighted):
    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(output, target)


@pytest.mark.parametrize(
    "loss", [Weighted(), partial(nn.functional.cross_entropy, weight=torch.tensor([1.0, 3.0, 9.0]), ignore_index=2)]
)
def test_options_count_wherever_they_are_set(loss: Any) -> None:
    """In a class that inherits all but them, or in a function of which they are a part."""
    targets = [torch.tensor([0, 2, 2]), torch.tensor([1, 2, 1]), torch.tensor([2, 2, 2])]
    known = Loss("own", loss)
    assert known.shares(targets, [3, 3, 3]) == [1 / 7, 6 / 7, 0.0]
    assert known.ignored == 2
    assert known(torch.randn(3, 3), targets[2], 3).total == 0.0  # torch's mean would be NaN


def test_options_of_functions_alone() -> None:
    weights = torch.ones(2, 3)
    loss = Loss("own", partial(nn.functional.huber_loss, delta=0.5))
    assert float(loss(torch.ones(2, 3), 0 * weights, 2).value) == 0.5 * (1 - 0.25)
    for other in (partial(nn.functional.mse_loss, weight=weights), partial(Focal(), reduction=1)):
        assert Loss("own", other).function is other
    with pytest.raises(UserError, match=r'has reduction="sum"'):
        Loss("own", partial(nn.functional.mse_loss, reduction="sum"))


def test_whoever_inherits_may_count_otherwise() -> None:
    targets, weight = [torch.tensor([0, 0]), torch.tensor([1, 1])], torch.tensor([1.0, 3.0])
    for own in (Focal(weight=weight), Called()):
        assert Loss("own", own).shares(targets, [2, 2]) == [0.5, 0.5]
    assert Loss("torch's", nn.CrossEntropyLoss(weight=weight)).shares(targets, [2, 2]) == [0.25, 0.75]


@pytest.mark.parametrize("loss", [nn.L1Loss(), nn.BCEWithLogitsLoss(), nn.functional.smooth_l1_loss, nn.functional.kl_div])
def test_elements_count_where_lengths_differ(loss: Any) -> None:
    assert Loss("elements", loss).shares([torch.zeros(2, 3), torch.zeros(2, 1)], [2, 2]) == [0.75, 0.25]


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss()])
def test_probabilities_count_where_lengths_differ(loss: Any) -> None:
    """Torch has those of the classes along dimension 1."""
    assert Loss("torch's", loss).shares([torch.zeros(2, 5, 3), torch.zeros(2, 5, 1)], [2, 2]) == [0.75, 0.25]


def test_what_a_loss_counts_it_counts_apart_in_a_trial() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return output.mean()

    loss = Loss("counting", Counting())
    loss.apart()(torch.ones(2), torch.ones(2), 2)
    assert loss.function.calls == 0


@pytest.mark.parametrize("narrow", [torch.uint8, torch.bool, torch.int8, torch.uint16])
def test_classes_of_any_width_count_alike(narrow: torch.dtype) -> None:
    """-100 as a uint8 is 156; a uint8 or a boolean index is a mask; torch cannot compare uint16."""
    wide = torch.tensor([0, 1]) if narrow == torch.bool else torch.tensor([0, 1, 127 if narrow == torch.int8 else 156])
    target, output = wide.to(narrow), nn.functional.one_hot(wide, 200).float()
    weights = torch.linspace(1, 2, 200)
    losses = Loss("plain", cross_entropy), Loss("weighted", CrossEntropy(weights.tolist(), 0.1)), find_loss("cross_entropy")
    for loss in (*losses, Loss("torch's", nn.CrossEntropyLoss(weight=weights)), Loss("bare", nn.CrossEntropyLoss())):
        assert loss.shares([target, target[:1]], [3, 1]) == loss.shares([wide, wide[:1]], [3, 1])
        assert loss.hits(output, target) == (len(wide), len(wide))
    for loss in losses:
        assert float(loss(output, target, 3).value) == float(loss(output, wide, 3).value)
    assert Metric("top5").part(output, target, 3, (0.0, 0.0)) == (len(wide), len(wide))


@pytest.mark.parametrize("function", [nn.CrossEntropyLoss(), nn.NLLLoss(), nn.functional.cross_entropy])
@pytest.mark.parametrize("length", [3, 5])
def test_classes_lie_where_the_loss_has_them(function: Any, length: int) -> None:
    """Torch's losses have them along dimension 1, and so has accuracy, also where a row is as long as there are classes."""
    loss, output = Loss("torch's", function), torch.randn(2, 5, length)
    loss.metrics = [Metric("top1")]
    target = output.argmax(1)
    assert loss.hits(output, target) == (target.numel(), target.numel())
    assert loss.measured(output, target, Result(0.0, 1.0, 0, 0, 2)) == [(float(target.numel()), float(target.numel()))]


@pytest.mark.parametrize("ignored", [0, -1, -100])
def test_a_class_that_the_loss_ignores_does_not_count(ignored: int) -> None:
    """Neither in accuracy nor in a metric that ranks scores."""
    loss = Loss("torch's", nn.CrossEntropyLoss(ignore_index=ignored))
    loss.metrics = [Metric("top1"), Metric("top2")]
    scores, target = torch.tensor([[3.0, 2.0, 1.0]] * 4), torch.tensor([ignored, 1, 2, ignored])
    assert loss.hits(scores, target) == (0, 2)
    assert loss.measured(scores, target, Result(0.0, 1.0, 0, 0, 4)) == [(0.0, 2.0), (1.0, 2.0)]


def test_a_users_metric_gets_all_that_the_model_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "topmost.py").write_text("def both(output, target):\n    return float(len(output)), 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert Metric("topmost:both").part((torch.ones(7), torch.ones(7)), torch.ones(7), 7, (0.0, 0.0)) == (2.0, 1.0)


def test_rows_do_not_get_each_others_classes() -> None:
    scores, classes = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [3, 0, 1]])
    whole = cross_entropy(scores, classes)
    for one, other in ((scores, classes.flatten()), (scores.flatten(0, 1), classes), (scores, classes.unsqueeze(-1))):
        assert cross_entropy(one, other) == whole
        loss = find_loss("cross_entropy")
        loss.metrics = [Metric("top1")]
        hits, targets = loss.hits(one, other)
        assert (hits, targets) == (int((scores.argmax(-1) == classes).sum()), 6)
        assert loss.measured(one, other, Result(0.0, 1.0, 0, 0, 2)) == [(float(hits), 6.0)]
    with pytest.raises(UserError, match=r"\(2, 3, 4\) float32 and targets \(3, 2\) int64.*: the shapes differ$"):
        find_loss("cross_entropy")(scores, classes.T, 2)


def test_metrics_are_those_of_the_whole_test_set() -> None:
    """However it is cut: quotients of sums, not means of means."""
    output, target = torch.randn(10, 3), torch.randn(10, 3)
    scored, classes = torch.randn(10, 8), torch.randint(8, (10,))
    parts = [slice(0, 4), slice(4, 8), slice(8, 10)]

    def value(name: str, output: torch.Tensor, target: torch.Tensor) -> float:
        metric = Metric(name)
        return metric.value([metric.part(output[s], target[s], len(target[s]), (0.0, 0.0)) for s in parts])

    assert value("mae", output, target) == pytest.approx(float(nn.functional.l1_loss(output, target)))
    assert value("mse", output, target) == pytest.approx(float(nn.functional.mse_loss(output, target)))
    best = scored.topk(5).indices
    assert value("top5", scored, classes) == pytest.approx(float((best == classes[:, None]).any(-1).double().mean()))
    for name, given in (("mse", (output, target[:, :1])), ("top5", (scored, classes[:, None])), ("top5", (scored, scored))):
        with pytest.raises(UserError, match=f'"{name}" cannot take what the model gives'):
            Metric(name).part(*given, 10, (0.0, 0.0))


def test_a_metric_of_ranks_knows_how_many_classes_there_are() -> None:
    """However many samples there are."""
    output, target = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([2])
    found = [Metric(f"top{n}").part(output, target, 1, (0.0, 0.0)) for n in (1, 2, 3, 4, 5)]
    assert found == [(0.0, 1.0), (0.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]
    with pytest.raises(UserError, match="unknown name"):
        Metric("top0")


def test_a_best_checkpoint_is_by_what_there_is() -> None:
    """Told before the first step; else there would never be one."""
    text = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\nmetrics=["mae"]\n[output]\ndirectory="r"\n'
    for best in ("loss", "accuracy", "mae"):
        assert len(metrics_of(parse(text, "job", [f"output.keep_best={best}", "train.patience=2"]))) == 1
    for keys, said in (
        (["output.keep_best=mse"], '"mse" is neither "loss" nor "accuracy"'),
        (["output.keep_best=loss", "train.evaluate_every=0"], "goes with evaluations"),
        (["train.patience=2"], "train.patience goes with output.keep_best"),
    ):
        with pytest.raises(UserError, match=said):
            metrics_of(parse(text, "job", keys))


def test_perplexity_is_that_of_the_mean_loss() -> None:
    perplexity = Metric("perplexity")
    losses = [perplexity.part(None, None, 4, loss) for loss in ((6.0, 3.0), (2.0, 1.0))]
    assert perplexity.value(losses) == pytest.approx(math.exp(2.0))
    assert perplexity.value([(800.0, 1.0)]) == math.inf
    assert math.isnan(perplexity.value([(0.0, 0.0)]))


def test_a_metric_s_name_fits_into_the_log() -> None:
    text = '[model]\nname = "m"\n[data]\nname = "d"\n[train]\nsteps = 1\nmetrics = ["mse", "some_module:%s"]\n'
    for name in ("é" * 35, "x" * 69):
        with pytest.raises(UserError, match=r"train\.metrics: .* bytes, and the log has room for 80"):
            metrics_of(parse(text % name + '[output]\ndirectory = "r"\n', "job"))


def test_classes_that_all_count_nothing_are_refused() -> None:
    text = '[model]\nname = "m"\n[data]\nname = "d"\n[train]\nsteps = 1\n[output]\ndirectory = "r"\n'
    with pytest.raises(UserError, match=r"^train\.class_weights: one of them must be more than 0"):
        loss_of(parse(text, "job", ["train.class_weights=[0,0.0]"]))


def test_what_does_not_go_with_a_models_own_loss() -> None:
    """It was left out without a word."""
    text = '[model]\nname="m"\noutput="loss"\n[data]\nname="d"\n[train]\nsteps=1\n[output]\ndirectory="r"\n'
    assert loss_of(parse(text, "job")).name == "the model's own"
    for shaped in ("train.label_smoothing=0.1", "train.class_weights=[1, 2]"):
        with pytest.raises(UserError, match=r'do not go with model\.output = "loss"'):
            loss_of(parse(text, "job", [shaped]))


def test_the_loss_names_a_class_that_has_no_weight() -> None:
    """It was met where weights are added up, in a traceback of this package."""
    weights, targets = torch.ones(3), torch.tensor([5, 1])
    for loss in (
        Loss("weighted", CrossEntropy(weights.tolist(), 0.0)),
        Loss("torch's", nn.CrossEntropyLoss(weight=weights)),
    ):
        assert loss.shares([targets], [2]) == [1.0]
        with pytest.raises((UserError, UsersBug), match="Target 5 is out of bounds"):
            loss(torch.zeros(2, 3), targets, 2)


def test_a_metric_whose_number_is_none() -> None:
    with pytest.raises(UserError, match="unknown name"):
        Metric("top\u00b2")


WEIGHTS = torch.tensor([1.0, 3.0, 9.0, 0.5])
CLASSES = torch.tensor([3, 0, -100, 1, 2, 2, 0, -100, -100, -100])  # the last micro-batch is padding
AMOUNTS = torch.linspace(-1, 1, 40).view(10, 4)
MIXED = torch.linspace(-1, 1, 40).view(10, 4).softmax(-1)
torchs_cross_entropy = nn.functional.cross_entropy


def of_samples(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum(-1).mean()


@pytest.mark.parametrize(
    ("loss", "target", "whole"),
    [
        (cross_entropy, CLASSES, torchs_cross_entropy),
        (cross_entropy, MIXED, torchs_cross_entropy),
        (CrossEntropy(WEIGHTS.tolist(), 0.0), CLASSES, partial(torchs_cross_entropy, weight=WEIGHTS)),
        (CrossEntropy([], 0.3), CLASSES, partial(torchs_cross_entropy, label_smoothing=0.3)),
        (CrossEntropy(WEIGHTS.tolist(), 0.3), MIXED, partial(torchs_cross_entropy, weight=WEIGHTS, label_smoothing=0.3)),
        (nn.CrossEntropyLoss(WEIGHTS), CLASSES, nn.CrossEntropyLoss(WEIGHTS)),
        (nn.CrossEntropyLoss(WEIGHTS), MIXED, nn.CrossEntropyLoss(WEIGHTS)),
        (find_loss("mse").function, AMOUNTS, nn.functional.mse_loss),
        (nn.SmoothL1Loss(), AMOUNTS, nn.SmoothL1Loss()),
        (of_samples, AMOUNTS, of_samples),
    ],
)
def test_a_step_s_loss_is_that_of_all_its_samples(loss: Any, target: torch.Tensor, whole: Any) -> None:
    """Both where backward begins and as it is reported, however the step is cut."""
    output, cut, judge = torch.linspace(3, -2, 40).sin().view(10, 4), (3, 5, 2), Loss("one", loss)
    expected = float(whole(output, target))
    outputs, targets = output.split(cut), target.split(cut)
    judged = [judge(*both, size) for *both, size in zip(outputs, targets, cut, strict=True)]
    shares = judge.shares(targets, cut)
    assert sum(float(one.value) * share for one, share in zip(judged, shares, strict=True)) == pytest.approx(expected)
    assert sum(one.total for one in judged) / sum(one.count for one in judged) == pytest.approx(expected)
    assert all(not one.summed for one in judged)


def test_sums_and_counts_of_a_users_loss_add_up() -> None:
    def of_what_counts(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (output - target)[target > 0].square().sum(), (target > 0).sum()

    judged = [
        Loss("own", of_what_counts)(torch.zeros(len(y)), y, len(y)) for y in (torch.tensor([1.0, -1, 3]), -torch.ones(2))
    ]
    assert [(one.total, one.count, one.summed) for one in judged] == [(10.0, 2.0, True), (0.0, 0.0, True)]
    for count, said in ((-1.0, "a count of -1.0"), (math.inf, "a count of inf"), (math.nan, "a count of nan")):
        with pytest.raises(UserError, match=f"it gives .sum, count. with {said}"):
            Loss("own", lambda *_, count=count: (torch.ones(()), count))(torch.ones(2), torch.ones(2), 2)


def test_there_are_no_hits_where_targets_are_no_classes_of_the_scores() -> None:
    scores, loss = torch.eye(3), Loss("own", lambda output, target: output.mean())
    others = [torch.ones(3), torch.ones(3, 1).long(), torch.ones(2).long(), {"a": torch.ones(3).long()}, None]
    for given, target in [*((scores, other) for other in others), (torch.tensor(1.0), torch.tensor(0)), (7, others[1])]:
        assert loss.hits(given, target) == (0, 0)
    assert loss.hits(scores, torch.tensor([0, 2, 2])) == (2, 3)
    assert loss.hits({"loss": torch.ones(()), "logits": scores}, torch.tensor([0, 2, 2])) == (2, 3)
    assert loss.hits((scores, torch.ones(7)), torch.tensor([0, 2, 2])) == (2, 3)


def test_smoothing_and_weights_of_classes_go_with_cross_entropy_alone() -> None:
    text = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\n[output]\ndirectory="r"\n'
    for shaped in ("train.label_smoothing=0.1", "train.class_weights=[1, 2]"):
        assert isinstance(loss_of(parse(text, "job", [shaped])).function, CrossEntropy)
        with pytest.raises(
            UserError, match=r'^train\.label_smoothing and train\.class_weights go with loss = "cross_entropy"'
        ):
            loss_of(parse(text, "job", [shaped, "train.loss=mse"]))
