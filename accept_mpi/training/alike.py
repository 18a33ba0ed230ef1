"""What all hosts must have alike: the code, the model, and the first values of what several ranks hold a copy of.

A copy that is out of date, or a variable in one host's environment, would otherwise change the results without a word.
"""

from collections.abc import Iterable

import torch
from xxhash import xxh3_64_hexdigest

from accept_mpi.comm.runtime import Runtime
from accept_mpi.data.checksums import Checksum, checksum
from accept_mpi.errors import Agreed, one_line
from accept_mpi.models import Chain
from accept_mpi.models.held import held
from accept_mpi.pipeline.stage import Stage
from accept_mpi.plan import Plan
from accept_mpi.planning.ties import parted
from accept_mpi.training.summing import copy_of
from accept_mpi.users_code import sources

_SHOWN = 160  # characters of a part of the model


def agree_on_code(runtime: Runtime) -> None:
    """Raise Agreed if a module of the user's, or of this program, is another one on one rank than on another. All ranks call
    this together, whenever modules may have been imported."""
    said: dict[str, tuple[int, str]] = {}
    told = runtime.messenger.allgather(sources(), runtime.startup_seconds, "checksums of the code")
    for rank, found in enumerate(told):
        for name, one in found.items():
            first, other = said.setdefault(name, (rank, one))
            if one != other:
                raise Agreed(
                    f'the module "{name}" differs between hosts: {runtime.at(rank)} has another file than '
                    f"{runtime.at(first)}; give all hosts the same code; what must differ, such as a path, can come "
                    "from the environment"
                )


def agree_on_model(runtime: Runtime, chain: Chain) -> None:
    """Raise Agreed if the user's function has made another model on one rank than on another, as far as its modules, their
    settings and the shapes of their state show, or if the files of its weights differ. All ranks call this together."""
    looks = {name: xxh3_64_hexdigest(text.encode(errors="surrogatepass")) for name, text in chain.looks.items()}
    told = runtime.messenger.allgather(looks, runtime.startup_seconds, "what the model looks like")
    for rank, found in enumerate(told):
        for name in dict.fromkeys([*told[0], *found]):
            if found.get(name) != told[0].get(name):
                own = one_line(chain.looks.get(name, "nothing"), _SHOWN)
                raise Agreed(
                    f'the model differs between hosts: its part "{name}", {own} on {runtime.at(runtime.rank)}, is '
                    f"another one on {runtime.at(rank)}; what model.name makes must not depend on the host, its "
                    "environment or the order of a set"
                )
    runtime.same("layers of the model", chain.names)
    file = chain.changes.file if chain.changes else None
    weights = runtime.agree("the weights", lambda: f"{file.path.name} (checksum {file.glimpse()})" if file else None)
    runtime.same("files of model.weights", weights)


def agree_on_copies(runtime: Runtime, stage: Stage, plan: Plan, chain: Chain) -> None:
    """Raise Agreed if ranks begin with different values of what each of them holds: a group's layers, a tied parameter. All
    ranks call this together."""
    place = plan.place(runtime.rank)
    mine: dict[str, Checksum] = {}
    if place.members > 1:
        for index, layer in enumerate(stage.layers, stage.start):
            mine[f'layer {index} "{stage.names[index - stage.start]}"'] = _checksum(
                [*layer.state_dict().values(), *layer.buffers(), *(one for _, one in held(layer))]
            )
    for one, stages in parted(chain.shared(), plan) if len(plan.stages) > 1 else ():
        if place.stage in stages:
            mine[one.text] = _checksum([copy_of(one, stage)])
    said: dict[str, tuple[int, Checksum]] = {}
    told = runtime.messenger.allgather(mine, runtime.startup_seconds, "checksums of the first weights")
    for rank, found in enumerate(told):
        for what, values in found.items():
            first, other = said.setdefault(what, (rank, Checksum(*values)))
            if not other.matches(Checksum(*values)):
                raise Agreed(
                    f"{what}: {runtime.at(rank)} begins with other values than {runtime.at(first)}; let the model "
                    "draw with torch's, NumPy's or Python's global random numbers, which are seeded, and give all hosts the "
                    "same files"
                )


def _checksum(values: Iterable[object]) -> Checksum:
    return checksum([value for value in values if isinstance(value, torch.Tensor) and _is_plain(value)])


def _is_plain(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized and not value.is_nested
