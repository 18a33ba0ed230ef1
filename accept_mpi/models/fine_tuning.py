"""What a job changes of a model before it trains: weights from a file, frozen parts, low-rank adapters (LoRA).

Hu et al. 2021, "LoRA", arXiv 2106.09685: a frozen matrix W becomes W + (alpha / rank) B A, and only A and B are trained.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from xxhash import xxh3_64_intdigest

from accept_mpi.errors import UserError
from accept_mpi.files.start_directory import from_start
from accept_mpi.job import Job, Lora
from accept_mpi.models.classes import put_before
from accept_mpi.models.memory import overlap
from accept_mpi.models.parts import part_at
from accept_mpi.models.weights_file import WeightsFile
from accept_mpi.registry import nearest
from accept_mpi.seeds import INIT, mix, seeded

_A, _B = "lora_a", "lora_b"
_SHOWN = 4


class Changes:
    """Changes that a job asks for. They are made to each new module as it is built, in place."""

    def __init__(self, job: Job) -> None:
        """Raises UserError if the file of weights cannot be read."""
        train = job.train
        self._freeze, self._unfreeze, self._lora, self._seed = train.freeze, train.unfreeze, train.lora, train.seed
        self._thawed = WeakIdKeyDictionary()
        """Parameters that are trained for one of their names; others may be in layers that are built later."""
        self.file = WeightsFile(from_start(job.model.weights), job.model.strict) if job.model.weights else None
        self._loads_itself: dict[str, None] = {}
        """Names of modules with code of their own for ``load_state_dict``, which is not called."""

    @property
    def any(self) -> bool:
        """True if there is anything to change."""
        return bool(self._freeze or self._unfreeze or self._lora or self.file)

    def apply(self, module: nn.Module, name: str) -> nn.Module:
        """Add adapters to a new module of the model, and freeze its parameters, or have them trained. ``name``: its own (""
        for the model)."""
        prefix = f"{name}." if name else ""
        lora = self._lora
        for path, part in list(module.named_modules(remove_duplicate=False)) if lora else ():
            whole = (prefix + path).rstrip(".")
            if lora and matches(whole, lora.targets):
                _adapt(part, whole, lora, self._seed)
        named: dict[nn.Parameter, list[str]] = {}
        for path, parameter in module.named_parameters(remove_duplicate=False):
            named.setdefault(parameter, []).append(prefix + path)
        frozen: set[int] = set()
        for parameter, names in named.items():
            if any(matches(one, self._unfreeze) for one in names):
                self._thawed[parameter] = None
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.requires_grad_(True)
            elif parameter not in self._thawed and self._is_frozen(names):
                parameter.requires_grad_(False)
                frozen.add(id(parameter))
        for part in module.modules():
            own = list(part.parameters(recurse=False))
            if isinstance(part, _NormBase) and own and all(id(parameter) in frozen for parameter in own):
                part.eval()  # its statistics belong to what is frozen
        self._loads_itself |= {prefix + path: None for path, part in module.named_modules() if _loads_itself(part)}
        return module

    def _is_frozen(self, names: Sequence[str]) -> bool:
        """True if the job freezes a parameter with these names, of which none is to be trained nevertheless."""
        only_adapters = self._lora is not None and not any(map(is_adapter, names))
        return only_adapters or any(matches(name, self._freeze) for name in names)

    def check(self, names: Sequence[str], modules: Sequence[str]) -> None:
        """Raise UserError for a pattern that none of the model's parameters (or for adapters, modules) match."""
        every = {"train.freeze": self._freeze, "train.unfreeze": self._unfreeze}
        for key, patterns in every.items():
            check_patterns(key, patterns, names)
        if self._lora:
            check_patterns("train.lora.targets", self._lora.targets, modules)

    @property
    def unheard(self) -> str:
        """What the log says beside what is loaded; empty if there is nothing."""
        first = next(iter(self._loads_itself), None)
        if first is None:
            return ""
        name = first.rstrip(".") or "the model"
        return (
            f"; {name} has hooks or functions of its own for loading, which are not called: names and values must fit as is"
        )


def _loads_itself(module: nn.Module) -> bool:
    """True if other code than torch's takes part in a module's ``load_state_dict``."""
    kind = type(module)
    own = (kind.load_state_dict, kind._load_from_state_dict)
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return not all(str(getattr(one, "__module__", "")).startswith("torch.") for one in (*own, *hooks))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if a name matches one of these patterns ("backbone.*")."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(key: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise UserError for a pattern that no name matches."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            hint = nearest(pattern, list(names)) or f" ({shown})"
            raise UserError(f'{key}: "{pattern}" matches nothing in the model{hint}')


def merged(state: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's state without adapters: what they add is in the weights. ``model``: one like it, with adapters and of any
    values. Raises UserError if that changes other uses of a weight."""
    found = {name: value for name, value in state.items() if not is_adapter(name)}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _Adapted):
            prefix = f"{path}." if path else ""
            weight, a, b = (prefix + name for name in ("weight", _A, _B))
            if other := _other_use(model, part_at(model, path)):
                raise UserError(
                    f"--merge: {weight} is {other}, too, which the adapter does not change; export without --merge"
                )
            if not {weight, a, b} <= state.keys():
                raise UserError(f"--merge: the checkpoint has no adapter of {path}: is the model another one by now?")
            added = module.lora_scale * (state[b] @ state[a])
            found[weight] = found[weight] + (added.T if module.lora_turned else added)
    return found


def _other_use(model: nn.Module, adapted: nn.Module) -> str:
    """Name under which another module has the weight of one with an adapter, or a part of it; "" if none has."""
    weight = adapted._parameters["weight"]
    assert weight is not None
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()) if module is not adapted else ():
            if tensor is not None and overlap(weight, tensor):
                return f"{path}.{name}" if path else name
    return ""


class _Adapted:
    """Forward of a module with an adapter."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float
    lora_turned: bool
    """True if the weight is (inputs, outputs), as transformers' Conv1D has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for uses in _USES:
            uses.with_adapter.add(id(self._parameters["weight"]))  # type: ignore[attr-defined]
        added = nn.functional.linear(nn.functional.linear(x, self.lora_a), self.lora_b)
        result: torch.Tensor = super().forward(x) + self.lora_scale * added  # type: ignore[misc]
        return result


class Uses(TorchFunctionMode):
    """Within the context: which parameters are given to torch's functions, and which of them by modules with adapters. Who
    gives a module's weight to a function instead of calling the module passes its adapter by."""

    def __init__(self) -> None:
        super().__init__()
        self.given: set[int] = set()
        """Ids of parameters, as in ``with_adapter``."""
        self.with_adapter: set[int] = set()

    def __enter__(self) -> Self:
        _USES.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _USES.remove(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        if any(isinstance(one, torch.Tensor) for one in results):  # else a shape or the like was asked for
            given = (*args, *(kwargs or {}).values())
            self.given |= {id(one) for one in given if isinstance(one, nn.Parameter)}
        return result

    def passed_by(self, parameter: nn.Parameter) -> bool:
        """True if a parameter was used, but by no module with an adapter."""
        return id(parameter) in self.given - self.with_adapter


_USES: list[Uses] = []


def _adapt(module: nn.Module, name: str, lora: Lora, seed: int) -> None:
    """Give a linear module an adapter, in place: it stays the same object, with its hooks. Raises UserError."""
    if isinstance(module, _Adapted):
        return  # met under another name
    kind = type(module)
    weight = module._parameters.get("weight")
    turned = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
    linear = isinstance(module, nn.Linear) or turned
    if linear and weight is None:
        raise UserError(
            f"train.lora.targets: the weight of {name} is computed from other parameters (parametrized), and adapters are "
            "added to plain weights: name other modules, or leave the parametrization out"
        )
    if weight is None or weight.dim() != 2 or not linear:
        raise UserError(f"train.lora.targets: {name} is a {kind.__name__}; adapters fit nn.Linear and transformers' Conv1D")
    given, out = weight.shape if turned else weight.shape[::-1]
    like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    with seeded(mix(INIT, seed, xxh3_64_intdigest(name.encode()))):
        a = torch.empty(lora.rank, given, **like)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    # Torch's encoder layers would compute with the weight alone in evaluation, and not call the module.
    torch.backends.mha.set_fastpath_enabled(False)
    put_before(module, _Adapted, "Adapted")
    module.register_parameter(_A, nn.Parameter(a))
    module.register_parameter(_B, nn.Parameter(torch.zeros(out, lora.rank, **like)))
    module.__dict__ |= {"lora_scale": (lora.alpha or lora.rank) / lora.rank, "lora_turned": turned}


def check_called(lora: Lora, names: Iterable[str]) -> None:
    """Raise UserError if one of the parameters with these names, which were ``passed_by``, should have an adapter."""
    for name in sorted(names):
        path, _, last = name.rpartition(".")
        if last == "weight" and matches(path, lora.targets):
            raise UserError(
                f"train.lora.targets: the model computes with the weight of {path} without calling that module (as "
                "nn.MultiheadAttention does with out_proj), so an adapter would not count: leave it out"
            )


def is_adapter(name: str) -> bool:
    """True if a parameter's name is that of an adapter."""
    return name.rpartition(".")[2] in (_A, _B)
