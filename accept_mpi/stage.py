"""One stage's compute: forward, backward, what is stashed in between, and the optimizer.

Weights of the asynchronous schedule are versions: after an update the modules get fresh leaf tensors, while each
micro-batch in flight keeps the ones that its graph was built with (PipeDream's weight stashing). The optimizer owns one
more copy, the newest. (Assigning ``p.data`` would not do: graphs hold the parameter, not its storage, and would compute
their gradients with the new weights.)
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from accept_mpi import config
from accept_mpi.codec import Tensors, TensorSpec
from accept_mpi.defer import DeferredWeights
from accept_mpi.errors import UserError
from accept_mpi.losses import Loss
from accept_mpi.models.layers import Layers, call_layer
from accept_mpi.optimizer import make_optimizer, update
from accept_mpi.seeds import forward_seed

Key = tuple[int, int]  # step, micro-batch


@dataclass
class Result:
    """What the last stage learns from one micro-batch: sums over its samples, and how many targets it was asked for."""

    loss: float
    correct: int
    targets: int
    samples: int


@dataclass
class _InFlight:
    """A micro-batch between its F and its B (or W)."""

    boxes: list["_Box"]
    outputs: list[torch.Tensor]
    leaves: list[nn.Parameter]
    whole: bool
    work: list[Any] = field(default_factory=list)


class Forward(NamedTuple):
    """What F gives."""

    outputs: Tensors
    """For the next stage; empty on the last."""
    result: Result | None
    """On the last stage."""
    suspect: int
    """1 + the first layer that made NaN or infinity out of finite values for this micro-batch; 0: none seen so far."""


class Stage:
    """A contiguous run of layers, ready to train."""

    def __init__(self, layers: Layers, job: config.Job, loss: Loss | None, channels_last: bool) -> None:
        """``loss`` (mean over samples) is given on the last stage; ``channels_last`` must be the same on all stages."""
        self.start, self.names, self.layers = layers.start, layers.names, layers.modules
        self._seed = job.train.seed
        self._loss = loss
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format
        if channels_last:
            for layer in self.layers:
                layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.parameters: list[nn.Parameter] = []
        self._places: list[list[tuple[nn.Module, str]]] = []
        self._parameter_names: list[str] = []
        self._find_parameters()
        self.optimizer = make_optimizer(job.train.optimizer, job.lr, [p for p in self.parameters if p.requires_grad])
        self._versions: dict[int, list[nn.Parameter]] | None = None
        if job.pipeline.schedule == "1f1b-async":
            self._versions = {}
            self._publish(0)
        self._deferred = DeferredWeights(self.layers) if job.pipeline.schedule == "zero-bubble" else None
        self._anchor = torch.zeros((), requires_grad=True)
        self.in_flight: dict[Key, _InFlight] = {}
        self._searches = 3

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.parameters)

    def from_data(self, values: torch.Tensor | tuple[torch.Tensor, ...]) -> Tensors:
        """A data set's inputs as the first stage takes them: images in the model's memory format."""
        return tuple(v.contiguous(memory_format=self._memory_format) if v.dim() == 4 else v for v in _unpack(values))

    def close(self) -> None:
        """Give the memory back, whoever still knows this object: another stage is to be built from it."""
        self.in_flight.clear()
        self._versions = {} if self._versions is not None else None
        self.optimizer = self._deferred = None
        self.layers, self.parameters, self._places = [], [], []  # the modules may be a user's own: they stay as they are

    # -- actions -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        step: int,
        micro_batch: int,
        inputs: Tensors,
        version: int = 0,
        target: torch.Tensor | None = None,
        weight: float = 1.0,
        suspect: int = 0,
        whole: bool = False,
    ) -> Forward:
        """F. ``inputs`` come from the wire or the data set; ``version`` counts updates since the segment began; on the last
        stage ``target`` is wanted, and the micro-batch's loss counts with ``weight`` in the step's. ``whole``: in the
        zero-bubble schedule, that B is to leave nothing to W."""
        boxes = [_Box(x) for x in inputs]
        leaves = self._use(version)
        if self._deferred is not None:
            self._deferred.on = not whole
        values = _pack([box.open(self._anchor) for box in boxes])
        for index, layer in enumerate(self.layers, self.start):
            torch.default_generator.manual_seed(forward_seed(self._seed, step, micro_batch, index))
            values = self._call(index, layer, values)
        outputs = _unpack(values)
        result = None
        if self._loss is not None:
            assert target is not None
            loss = self._loss(outputs[0], target)
            result = Result(loss.item() * len(target), *_hits(outputs[0], target), len(target))
            outputs = [loss * weight]
        if suspect == 0 and not _finite(outputs):
            suspect = self._search(step, micro_batch, inputs)
        self.in_flight[step, micro_batch] = _InFlight(boxes, outputs, leaves, whole)
        return Forward(() if result else tuple(outputs), result, suspect)

    def backward(self, step: int, micro_batch: int, gradients: Tensors) -> Tensors:
        """B: gradients of the inputs that want one, for the stage before; ``gradients`` is empty on the last stage."""
        flight = self.in_flight[step, micro_batch]
        if self._loss is not None:
            roots, seeds = flight.outputs, [torch.ones_like(flight.outputs[0])]
        else:
            wanting = [out for out in flight.outputs if out.requires_grad]
            pairs = [(out, g) for out, g in zip(wanting, gradients, strict=True) if g is not None]
            roots, seeds = [out for out, _ in pairs], [g for _, g in pairs]
        if roots and roots[0].requires_grad:
            _Seeded.apply(seeds, *roots).backward()
        flight.outputs = []
        if self._deferred is not None and not flight.whole:
            flight.work = self._deferred.collect()
        else:
            self._finish(step, micro_batch)
        return tuple(box.gradient for box in flight.boxes if box.wants_gradient)

    def weight_gradient(self, step: int, micro_batch: int) -> None:
        """W: what B left to do."""
        DeferredWeights.run(self.in_flight[step, micro_batch].work)
        self._finish(step, micro_batch)

    def update(self, lr: float, version: int) -> None:
        """U: one optimizer step; from here on the weights are version ``version`` + 1 of the segment."""
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            update(self.optimizer)
        if self._versions is not None:
            self._publish(version + 1)

    def drained(self) -> None:
        """A segment is over: nothing is in flight, and versions count from 0 again."""
        assert not self.in_flight, f"micro-batches {sorted(self.in_flight)} are still in flight"
        if self._versions is not None:
            newest = self._versions[max(self._versions)]
            self._versions = {0: newest}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within: the newest weights, no dropout, BatchNorm's running statistics."""
        if self._versions is not None:
            self._install(self._versions[max(self._versions)])
        for layer in self.layers:
            layer.eval()
        try:
            yield
        finally:
            for layer in self.layers:
                layer.train()

    @torch.no_grad()
    def evaluate(self, inputs: Tensors, target: torch.Tensor | None) -> tuple[Tensors, Result | None]:
        """E, within ``evaluating``: outputs for the next stage, or the result on the last."""
        values = _pack(list(inputs))
        for index, layer in enumerate(self.layers, self.start):
            values = self._call(index, layer, values)
        outputs = _unpack(values)
        if self._loss is None:
            return tuple(outputs), None
        assert target is not None
        loss = self._loss(outputs[0], target).item() * len(target)
        return (), Result(loss, *_hits(outputs[0], target), len(target))

    # -- agreement on shapes -------------------------------------------------------------------------------------------

    def probe(
        self, inputs: Tensors, target: torch.Tensor | None, gradients_of: Callable[[Sequence[TensorSpec]], Tensors]
    ) -> tuple[TensorSpec, ...]:
        """One forward and backward for the shapes of what crosses, leaving no trace in weights, statistics or gradients.

        ``gradients_of`` is asked, with the outputs' specs, for gradients of the same layout as training will send.
        Returns the specs of the inputs' gradients.
        """
        saved = [{name: buffer.clone() for name, buffer in layer.named_buffers()} for layer in self.layers]
        try:
            outputs = self.forward(0, 0, inputs, target=target).outputs
            gradients = gradients_of([TensorSpec.of(out) for out in outputs])
            result = self.backward(0, 0, gradients)
            if self._deferred is not None:
                self.weight_gradient(0, 0)
        finally:
            self.in_flight.clear()
            if self._deferred is not None:
                self._deferred.collect()
            for layer, buffers in zip(self.layers, saved, strict=True):
                for name, buffer in layer.named_buffers():
                    buffer.copy_(buffers[name])
            for parameter in self.parameters:
                parameter.grad = None
        return tuple(TensorSpec.of(g) for g in result)

    # -- state ---------------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The newest weights under their names in the whole model."""
        yield from zip(self._parameter_names, self.parameters, strict=True)

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of weights and buffers, contiguous, under their names in the whole model."""
        state = {}
        for name, layer in zip(self.names, self.layers, strict=True):
            for key, value in layer.state_dict().items():
                state[f"{name}.{key}"] = value.detach().contiguous().clone()
        return state

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Copies of the optimizer's tensors as "<what>/<parameter's name>"."""
        if self.optimizer is None:
            return {}
        return {
            f"{what}/{name}": value.detach().contiguous().clone()
            for name, parameter in self.named_parameters()
            for what, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def load(self, weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor]) -> None:
        """Take over weights and optimizer state. Raises UserError where they are another model's."""
        with torch.no_grad():
            for name, layer in zip(self.names, self.layers, strict=True):
                prefix = f"{name}."
                own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
                try:
                    layer.load_state_dict(own, strict=True)
                except RuntimeError as error:
                    reason = " ".join(str(error).split())
                    raise UserError(f'the checkpoint does not fit layer "{name}" of this model: {reason}') from error
            if self._versions is not None:  # modules hold the newest version's leaves, the optimizer its own copy
                for parameter, leaf in zip(self.parameters, self._leaves(), strict=True):
                    parameter.copy_(leaf)
            if self.optimizer is None:
                return
            for name, parameter in self.named_parameters():
                for key, value in optimizer.items():
                    what, _, of = key.partition("/")
                    if of == name:
                        like = parameter if value.shape == parameter.shape else value
                        self.optimizer.state[parameter][what] = torch.empty_like(like, dtype=value.dtype).copy_(value)

    # ------------------------------------------------------------------------------------------------------------------

    def _find_parameters(self) -> None:
        """Parameters once each, and every place in a module where one sits (a layer may use one twice)."""
        position: dict[int, int] = {}
        for layer_name, layer in zip(self.names, self.layers, strict=True):
            for module_name, module in layer.named_modules(prefix=layer_name):
                for name, parameter in module._parameters.items():
                    if parameter is None:
                        continue
                    if id(parameter) not in position:
                        position[id(parameter)] = len(self.parameters)
                        self.parameters.append(parameter)
                        self._places.append([])
                        self._parameter_names.append(f"{module_name}.{name}")
                    self._places[position[id(parameter)]].append((module, name))

    def _publish(self, version: int) -> None:
        """Give the modules fresh leaves with the newest weights, under a version number."""
        assert self._versions is not None
        self._versions[version] = [nn.Parameter(p.detach().clone()) if p.requires_grad else p for p in self.parameters]
        self._install(self._versions[version])

    def _install(self, leaves: list[nn.Parameter]) -> None:
        for places, leaf in zip(self._places, leaves, strict=True):
            for module, name in places:
                module._parameters[name] = leaf

    def _leaves(self) -> list[nn.Parameter]:
        return [places[0][0]._parameters[places[0][1]] for places in self._places]  # type: ignore[misc]

    def _use(self, version: int) -> list[nn.Parameter]:
        """The parameters that version ``version`` computes with. Older ones live on only in graphs in flight."""
        if self._versions is None:
            return self.parameters
        for old in [v for v in self._versions if v < version]:
            del self._versions[old]
        self._install(self._versions[version])
        return self._versions[version]

    def _finish(self, step: int, micro_batch: int) -> None:
        """A micro-batch's gradients are complete: hand them to the optimizer's parameters."""
        flight = self.in_flight.pop((step, micro_batch))
        if self._versions is None:
            return  # autograd has accumulated them there
        for parameter, leaf in zip(self.parameters, flight.leaves, strict=True):
            if leaf.grad is not None:
                parameter.grad = leaf.grad if parameter.grad is None else parameter.grad.add_(leaf.grad)
                leaf.grad = None

    def _call(self, index: int, layer: nn.Module, values: Any) -> Any:
        return call_layer(index, self.names[index - self.start], layer, values)

    def _search(self, step: int, micro_batch: int, inputs: Tensors) -> int:
        """Outputs are not finite: find the layer by running a copy of the stage once more, layer by layer."""
        if self._searches == 0 or not _finite([x for x in inputs if x is not None]):
            return 0
        self._searches -= 1  # a model may mean its infinities (masks); do not search for ever
        with torch.no_grad():
            values = _pack(list(inputs))
            for index, layer in enumerate(self.layers, self.start):
                torch.default_generator.manual_seed(forward_seed(self._seed, step, micro_batch, index))
                values = copy.deepcopy(layer)(values)
                if not _finite(_unpack(values)):
                    return index + 1
        return self.start + len(self.layers)


class _Box:
    """One input tensor of a micro-batch on its way into the graph, and its gradient on the way out."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor
        self.wants_gradient = tensor is not None and tensor.requires_grad
        self.gradient: torch.Tensor | None = None

    def open(self, anchor: torch.Tensor) -> torch.Tensor:
        assert self.tensor is not None
        tensor: torch.Tensor = _Enter.apply(anchor, self) if self.wants_gradient else self.tensor
        self.tensor = None
        return tensor


class _Seeded(torch.autograd.Function):
    """A scalar; its backward gives these outputs these gradients. (``torch.autograd.backward`` would, too, but imports sympy
    to compare their shapes: 35 MB and a third of a second of CPU in every process.)"""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *ctx.gradients


class _Enter(torch.autograd.Function):
    """A stage's input as a non-leaf without a copy, so that a first layer may work in place, as it may when whole."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, box: _Box) -> torch.Tensor:
        ctx.box = box
        assert box.tensor is not None
        return box.tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.box.gradient = gradients[0]
        return None, None


def _pack(values: Sequence[Any]) -> Any:
    """What a layer is called with: a lone tensor as it is, several as a tuple."""
    return values[0] if len(values) == 1 else tuple(values)


def _unpack(values: Any) -> list[torch.Tensor]:
    return list(values) if isinstance(values, tuple | list) else [values]


def _finite(values: Sequence[torch.Tensor]) -> bool:
    """Whether all values are finite: by their sum first, which is one pass, and only then one by one."""
    for value in values:
        if value.is_floating_point() and not torch.isfinite(value.detach().sum()) and not value.isfinite().all():
            return False
    return True


def _hits(output: torch.Tensor, target: torch.Tensor) -> tuple[int, int]:
    """Targets that the highest of the last dimension's scores hits, and how many there are (0: means nothing here)."""
    if target.is_floating_point() or output.shape[:-1] != target.shape:
        return 0, 0
    return int((output.detach().argmax(-1) == target).sum()), target.numel()
