"""Losses by name. A step's loss is a mean over everything that counts in the step, however it is cut into micro-batches.

What counts: targets that are not ignored (-100), with the weights of their classes; elements that are compared; samples, if
a user's function returns a plain mean. How much counts in each micro-batch is known from the step's targets before its first
forward, so each mean is multiplied by its share of the step at once. Only a user's function that returns ``(sum, count)``
says so later: its sums are divided by an estimate first, and gradients are corrected before the update (``Stage.update``).
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from accept_mpi import tree
from accept_mpi.errors import UserError, counted
from accept_mpi.job import Job
from accept_mpi.models.copies import copied
from accept_mpi.models.graph import parameters_behind
from accept_mpi.models.separable import separable
from accept_mpi.registry import call, find_function
from accept_mpi.users_code import RAISED, blame, does_not_fit, in_words

IGNORED = -100
"""Class that does not count, the same as in torch's losses."""
OWN = "loss"
"""``model.output`` of a model that computes its loss itself."""


@dataclass(frozen=True)
class Judgement:
    """Loss of one micro-batch."""

    value: torch.Tensor
    """Scalar at which backward begins: the mean over what counts, or the sum."""
    count: float
    """Amount that counts: targets, elements, samples or class weights."""
    summed: bool
    """True if ``value`` is a sum."""

    @property
    def total(self) -> float:
        """Sum of the loss over what counts."""
        value = float(self.value.detach())
        return value if self.summed or not self.count else value * self.count


@dataclass
class Result:
    """Loss and accuracy of one micro-batch, known on the last stage."""

    loss: float
    """Sum over everything that counts."""
    count: float
    """Amount that counts."""
    correct: int
    targets: int
    """Number of targets that count for accuracy; ``correct`` of them are hits."""
    samples: int
    metrics: list[tuple[float, float]] = field(default_factory=list)
    """Sum and count of each metric, in an evaluation."""


class Loss:
    """A loss, called as ``loss(output, target, samples)``: ``output`` is the last layer's value, ``target`` the data
    set's."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """``function(output, target)`` returns a mean over samples, or (sum, count)."""
        function = _as_module(function)
        self.name, self.function = name, function
        self.on_trial = False
        """True for a copy that trials and timings use (``apart``)."""
        self.metrics: list[Any] = []
        """Metrics (``models.metrics``) of an evaluation."""
        self.beginning: dict[str, torch.Tensor] | None = None
        """What it remembered before the first step (``pipeline.remembered``), once that is known."""
        self.put_back: Callable[[], None] | None = None
        """Sets its constants to what they were then."""
        self.looked_at: list[bool] = []
        """Whether its mean over samples is that of each sample's (``models.separable``), once that is known."""
        self.ignored = getattr(function, "ignore_index", IGNORED)
        """Class of targets that count neither in the loss nor in accuracy."""
        self._weigh, self._main = next((known for one, known in _KNOWN.items() if one is function), (None, False))
        if isinstance(function, CrossEntropy):
            self._weigh, self._main = function.count, True
        if isinstance(function, nn.Module) and getattr(function, "reduction", "mean") == "sum":
            raise UserError(
                f'train.loss: "{name}" has reduction="sum", and a step\'s loss is a mean over what counts: use "mean", or a '
                "function that gives (sum, count)"
            )
        torchs = _computes_as(function, nn.CrossEntropyLoss, nn.NLLLoss)
        self._second = torchs or function in (F.cross_entropy, F.nll_loss)
        """True if the scores of classes lie along dimension 1, as torch's losses have it, not along the last one."""
        owner = getattr(function, "__self__", function)  # a module's method, too
        if isinstance(owner, nn.Module) and any(parameter.requires_grad for parameter in owner.parameters()):
            raise UserError(
                f'train.loss: "{name}" has parameters of its own that are to be trained, and only the model\'s are: '
                'make them part of the model, with model.output = "loss", or freeze them'
            )
        if getattr(function, "reduction", None) == "mean":
            if torchs:
                self._weigh = self._classes
            elif _computes_as(function, *_ELEMENTWISE.values()):
                self._weigh = _elements

    def __call__(self, output: Any, target: Any, samples: int, setting_up: bool = False) -> Judgement:
        """Judge one micro-batch. Raises UserError for what the loss cannot take while ``setting_up`` or on trial, UsersBug
        for any other exception in it."""
        if self._main:
            output = scores(output)
        looks = setting_up and not self.looked_at and self._weigh is None and self.function is not _own
        given = [tree.replace(one, torch.clone) for one in (output, target)] if looks else []  # a loss may work in place
        try:
            judged = self._judged(output, target, samples)
        except RAISED as error:
            if self._main or ((setting_up or self.on_trial) and (isinstance(error, _Unfit) or does_not_fit(error))):
                took = f"outputs {tree.describe(output)} and targets {tree.describe(target)}"
                reason = str(error) if isinstance(error, _Unfit) else in_words(error)
                wants = ""
                if self.function is cross_entropy or isinstance(self.function, CrossEntropy):
                    wants = _WANTS_SECOND if _along_second(output, target) else _WANTS
                raise UserError(f'train.loss: "{self.name}" cannot take {took}{wants}: {reason}') from error
            if isinstance(error, _Unfit):
                raise UserError(f'train.loss: "{self.name}": {error}') from error
            blame(error, f'the loss "{self.name}"')
        if setting_up and (strange := parameters_behind([judged.value], tree.leaves(output))):
            raise UserError(
                f'train.loss: "{self.name}" uses a parameter of shape {tuple(strange[0].shape)} beside what the model '
                f'gives, and would not train it: let the model compute its loss (model.output = "{OWN}"), or freeze it'
            )
        if looks:
            self.looked_at.append(self._separable(given[0], given[1], samples))
        return judged

    def _separable(self, output: Any, target: Any, samples: int) -> bool:
        """``models.separable``, of copies, which may count."""

        def judge(output: Any, target: Any, samples: int) -> tuple[float, float]:
            (function,) = copied([self.function])
            judged = _judgement(function(output, target), samples)
            return judged.total, judged.count

        return separable(judge, output, target, samples)

    def _judged(self, output: Any, target: Any, samples: int) -> Judgement:
        if self._weigh is None:
            return _judgement(self.function(output, target), samples)
        count = self._weigh(target)
        if count == 0:  # all of it is padding, and the mean would be NaN
            return Judgement(_sum_of(self.function)(output, target), 0.0, False)
        return Judgement(_scalar(self.function(output, target)), count, False)

    @property
    def of_amounts(self) -> bool:
        """True if it compares what the model gives with amounts, or with one bit each: these are no scores of classes."""
        of_classes = self.function is F.kl_div or isinstance(self.function, nn.KLDivLoss)
        return self._weigh is _elements and not of_classes

    def apart(self) -> "Loss":
        """Copy for a trial, so that what the loss counts or keeps comes from training alone."""
        try:
            apart = Loss(self.name, copied([self.function])[0])
            apart.metrics, apart.on_trial, apart.looked_at = self.metrics, True, self.looked_at
            return apart
        except Exception:  # some modules cannot be copied
            return self

    def shares(self, targets: Sequence[Any], samples: Sequence[int]) -> list[float]:
        """Share of each micro-batch in a step: of everything that counts if that is known, else of the samples."""
        counts: list[float] = list(samples)
        if self._weigh is not None:
            counts = [self._weigh(target) for target in targets]
        total = sum(counts)
        return [count / total if total else 0.0 for count in counts]

    def measured(self, output: Any, target: Any, result: Result, setting_up: bool = False) -> list[tuple[float, float]]:
        """Sum and count of each metric, for a micro-batch with this ``result``; ``setting_up`` as in ``Metric.part``."""
        loss, scored = (result.loss, result.count), self._scored(output, target)
        return [
            metric.part(*(scored if metric.ranks else (output, target)), result.samples, loss, setting_up, self.ignored)
            for metric in self.metrics
        ]

    def hits(self, output: Any, target: Any) -> tuple[int, int]:
        """Number of targets that get the highest score, and number of targets; (0, 0) if that makes no sense."""
        given, target = self._scored(output, target)
        if not isinstance(target, torch.Tensor) or not isinstance(given, torch.Tensor):
            return 0, 0
        if target.is_floating_point() or given.shape[:-1] != target.shape or not given.dim():
            return 0, 0
        classes = widened(target)
        counting = classes != self.ignored
        return int((given.detach().argmax(-1) == classes)[counting].sum()), int(counting.sum())

    def _scored(self, output: Any, target: Any) -> tuple[Any, Any]:
        """``scores``, with those of classes along the last dimension, and targets; classes that the built-in cross entropy
        takes in another shape are in that of the scores."""
        given = scores(output)
        if self._second and isinstance(given, torch.Tensor) and given.dim() > 2:
            given = given.movedim(1, -1)
        flat = self.function is cross_entropy or isinstance(self.function, CrossEntropy)
        if flat and isinstance(given, torch.Tensor) and isinstance(target, torch.Tensor) and not target.is_floating_point():
            shape = given.shape[:-1]
            target = target.reshape(shape) if target.numel() == shape.numel() else target
        return given, target

    def _classes(self, target: torch.Tensor) -> float:
        """Amount that counts in ``target``, as torch's classification losses compute it."""
        weight = getattr(self.function, "weight", None)
        if target.is_floating_point():
            return _torchs_targets(target)
        classes = widened(target)
        counting = classes[classes != self.ignored]
        return float(counting.numel()) if weight is None else _weight_of(counting, weight)


def scores(output: Any) -> Any:
    """Part of a model's output that the built-in losses and accuracy use: the output itself, or the "logits" of a mapping
    or named tuple, else the first part."""
    while isinstance(output, tuple | list | dict) and output:
        if isinstance(output, dict):
            output = output["logits"] if "logits" in output else next(iter(output.values()))
        elif "logits" in getattr(output, "_fields", ()):
            output = output.logits  # type: ignore[union-attr]
        else:
            output = output[0]
    return output


def widened(target: torch.Tensor) -> torch.Tensor:
    """Classes as int64: compared with a uint8, -100 is 156, and a uint8 or boolean index is a mask. Probabilities stay."""
    return target if target.is_floating_point() else target.long()


def counts_known(name: str) -> bool:
    """True if what counts in a target of this loss is known before the loss is computed; of users' own it is not."""
    return name in _LOSSES


def loss_of(job: Job) -> Loss:
    """Loss that a job asks for. Raises UserError with one sentence."""
    train, own = job.train, job.model.output == OWN
    if own and (train.label_smoothing or train.class_weights):
        raise UserError(
            f'train.label_smoothing and train.class_weights do not go with model.output = "{OWN}": the model computes its '
            "loss itself"
        )
    if own:
        return Loss("the model's own", _own)
    if train.mix and train.loss == "mse" and train.evaluate_every:
        raise UserError('train.mix: evaluations have classes as targets, not probabilities, which loss = "mse" cannot take')
    if train.label_smoothing or train.class_weights:
        if train.loss != "cross_entropy":
            raise UserError('train.label_smoothing and train.class_weights go with loss = "cross_entropy"')
        if train.class_weights and not any(train.class_weights):
            raise UserError("train.class_weights: one of them must be more than 0, or nothing counts")
        return Loss(train.loss, CrossEntropy(train.class_weights, train.label_smoothing))
    return find_loss(train.loss)


def find_loss(name: str) -> Loss:
    """Loss of a name; of a class of modules it is a module made without arguments. Raises UserError with one sentence."""
    function: Any = _LOSSES.get(name) or find_function(name, _LOSSES, "train.loss")
    if isinstance(function, type) and issubclass(function, nn.Module):
        function = call(function, {}, "train.loss", 0)
    return Loss(name, function)


def _own(output: Any, target: Any) -> Any:
    """The loss that the model has computed itself."""
    return output


class CrossEntropy:
    """Cross entropy with weights of classes, and with targets smoothed towards all classes alike."""

    def __init__(self, weights: Sequence[float], smoothing: float) -> None:
        self.weight = torch.tensor(weights) if weights else None
        self.smoothing = smoothing

    def __call__(self, output: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        weight = None if self.weight is None else self.weight.to(output.device)
        return cross_entropy(output, target, reduction, weight=weight, label_smoothing=self.smoothing)

    def count(self, target: torch.Tensor) -> float:
        """Amount that counts in a target."""
        if self.weight is None or target.is_floating_point():
            return _not_ignored(target)
        classes = widened(target)
        return _weight_of(classes[classes != IGNORED], self.weight.to(target.device))


def cross_entropy(output: torch.Tensor, target: torch.Tensor, reduction: str = "mean", **options: Any) -> torch.Tensor:
    """Cross entropy of scores (..., classes) against classes (...), or against probabilities (..., classes). Dimensions of 1
    do not matter, and either side may be flat. ``options`` are torch's. Raises ValueError if shapes differ otherwise."""
    if target.is_floating_point() and target.shape == output.shape:
        target = target.reshape(-1, target.shape[-1])
    else:
        flat = target.dim() == 1 or output.dim() == 2
        if not flat and [n for n in target.shape if n != 1] != [n for n in output.shape[:-1] if n != 1]:
            raise ValueError("the shapes differ")  # in another order, rows would get each other's classes
        target = target.reshape(-1)
        target = widened(target)
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target, reduction=reduction, **options)


def mse(output: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Squared differences of two tensors of the same shape, as their mean or (``reduction``) sum. Raises ValueError if
    shapes differ."""
    if output.shape != target.shape:
        raise ValueError("the shapes differ")  # torch would broadcast
    return F.mse_loss(output, target, reduction=reduction)


def _along_second(output: Any, target: Any) -> bool:
    """True if the scores of classes seem to lie along dimension 1, as a convolution gives them for each pixel."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    return output.dim() > 2 and (output.shape[0], *output.shape[2:]) == target.shape


class _Unfit(ValueError):
    """A loss returned neither a mean nor (sum, count)."""


def _judgement(found: Any, samples: int) -> Judgement:
    """Judgement from what a user's function returned. Raises _Unfit."""
    if not isinstance(found, tuple | list):
        return Judgement(_scalar(found), float(samples), False)
    if len(found) != 2:
        raise _Unfit(f"it gives {counted(len(found), 'value')} instead of a mean over samples, or (sum, count)")
    if isinstance(found[1], torch.Tensor) and found[1].requires_grad:
        raise _Unfit("it gives two values that need gradients instead of a mean over samples, or (sum, count): add them up")
    count = float(found[1])
    if not 0 <= count < math.inf:
        raise _Unfit(f"it gives (sum, count) with a count of {count}")
    return Judgement(_scalar(found[0]), count, True)


def _scalar(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise _Unfit(f"it gives a {type(value).__name__} instead of a tensor")
    if value.numel() != 1:
        raise _Unfit(f"it gives {value.numel()} values instead of the mean over samples")
    return value.reshape(())


def _as_module(function: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's module for one of its functions with options (``functools.partial``), which then are known."""
    if isinstance(function, partial) and not function.args and function.func in _MODULES:
        with suppress(TypeError):  # an option that only the function has
            return _MODULES[function.func](**function.keywords)
    return function


def _computes_as(function: Callable[..., Any], *kinds: type[nn.Module]) -> bool:
    """True if it is a module of one of these kinds, or of a class that sets other options only: with a forward of its own,
    it may count otherwise."""
    of = type(function)
    return any(issubclass(of, kind) and (of.forward, of.__call__) == (kind.forward, kind.__call__) for kind in kinds)


def _sum_of(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """The same loss, but summed."""
    if isinstance(function, nn.Module):
        summed = copy.copy(function)
        summed.reduction = "sum"  # type: ignore[assignment]
        return summed
    return lambda output, target: function(output, target, reduction="sum")


def _not_ignored(target: torch.Tensor) -> float:
    """Number of targets that count: classes that are not ignored, or the rows of probabilities."""
    if target.is_floating_point():
        return float(target.numel() / max(1, target.shape[-1]))
    return float((widened(target) != IGNORED).sum())


def _torchs_targets(target: torch.Tensor) -> float:
    """The same for torch's own functions, which have the probabilities of classes along dimension 1."""
    if target.is_floating_point():
        return float(target.numel() / max(1, target.shape[1 if target.dim() > 1 else 0]))
    return _not_ignored(target)


def _weight_of(classes: torch.Tensor, weight: torch.Tensor) -> float:
    """Weights of targets together. The loss itself says which classes it does not know."""
    return float(weight[classes[(classes >= 0) & (classes < len(weight))]].sum())


def _elements(target: torch.Tensor) -> float:
    return float(target.numel())


_ELEMENTWISE: dict[Any, type[nn.Module]] = {
    F.mse_loss: nn.MSELoss, F.l1_loss: nn.L1Loss, F.smooth_l1_loss: nn.SmoothL1Loss, F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss, F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss, F.kl_div: nn.KLDivLoss, F.soft_margin_loss: nn.SoftMarginLoss,
    F.hinge_embedding_loss: nn.HingeEmbeddingLoss,
}  # fmt: skip
"""Torch's losses that are means over the elements of targets: functions, and the modules that call them."""
_MODULES = {F.cross_entropy: nn.CrossEntropyLoss, F.nll_loss: nn.NLLLoss, **_ELEMENTWISE}
_KNOWN: dict[Any, tuple[Callable[[torch.Tensor], float] | None, bool]] = {
    cross_entropy: (_not_ignored, True),
    mse: (_elements, True),
    F.cross_entropy: (_torchs_targets, False),
    F.nll_loss: (_not_ignored, False),
    **dict.fromkeys(_ELEMENTWISE, (_elements, False)),
}
"""Known losses: the function that counts a target (None if unknown), and True if the loss uses a model's scores alone."""
_LOSSES: dict[str, Callable[..., torch.Tensor]] = {"cross_entropy": cross_entropy, "mse": mse}
_WANTS = "; it wants scores (..., n) and int64 classes (...) from 0 to n - 1"
_WANTS_SECOND = f'{_WANTS}, and "torch.nn:CrossEntropyLoss" takes scores (samples, n, ...)'
