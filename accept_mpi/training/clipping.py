"""Clipping of gradients by their norm over the whole model, of which each stage knows only its part.

Stages send each other the norms of their parameters' gradients, a few bytes each, and each computes the same factor, with
the operations of ``torch.nn.utils.clip_grad_norm_`` in the order of the model's parameters: bit for bit what one process
gets.

In synchronous schedules an update waits for the norms of all stages in the same step; the schedule has the stages wait for
each other there anyway. In the delayed one it does, too, but stages tell theirs as soon as a step's last B is over, and
update only before the first F that needs it (``schedule.Updates``). In the asynchronous one it takes its own norms of this
step, and the others' of a step that they have made by then, always as many steps before, so that no stage waits and a run
can be repeated.
"""

import queue
import time
from collections.abc import Collection, Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from accept_mpi.codecs.gradient_chunks import Gradients
from accept_mpi.comm.channels import wait_for
from accept_mpi.comm.data_plane import DataPlane
from accept_mpi.comm.messages import Control, GradientNorms
from accept_mpi.comm.messenger import Messenger
from accept_mpi.errors import DeadlineError
from accept_mpi.pipeline.kept_norms import KeptNorms, Norms

_EPSILON = 1e-6  # as torch's
_LOOK = 0.2  # seconds between two looks at whether the run goes on


class Clipping:
    """One rank's part."""

    def __init__(
        self,
        most: float,
        plane: DataPlane,
        stage: int,
        stages: int,
        ranks: Sequence[int],
        delay: int,
        steps: range,
        early: bool,
        kept: KeptNorms,
        known: Collection[int],
    ) -> None:
        """``most``: norm that gradients may have; ``stage`` of ``stages``: this rank's; ``ranks``: those of the other
        stages, if this rank tells them; ``delay``: steps by which their norms are older; ``steps``: the deployment's;
        ``early``: norms are told some time before the update; ``kept``: this stage's last norms; ``known``: steps before the
        deployment's of which all stages have kept theirs. Tells those."""
        self.early = early
        self._most, self._plane, self._stage, self._stages, self._ranks = most, plane, stage, stages, ranks
        self._delay, self._steps, self._kept, self._known = delay, steps, kept, frozenset(known)
        self._told: dict[int, Norms] = {}
        self._heard: queue.SimpleQueue[GradientNorms] = queue.SimpleQueue()
        self._norms: dict[int, dict[int, Norms]] = {}
        for step in sorted(known):
            self._tell(step, kept.of[step])

    def handle(self, control: Control) -> bool:
        """Take a message of another stage; False if it is of another kind. Called on the data-plane thread."""
        if isinstance(control, GradientNorms):
            self._heard.put(control)
            return True
        return False

    def tell(self, step: int, gradients: Gradients, positions: Sequence[int | None]) -> None:
        """Tell the other stages the norms of a step's gradients here. ``positions``: those of their parameters in the model;
        None for one that another stage counts."""
        pairs = zip(positions, gradients, strict=False)  # nothing is trained here: no gradients
        counted = [(at, g) for at, g in pairs if at is not None and g is not None]
        # Together, since each number that comes from a GPU is waited for.
        norms = torch.stack([torch.linalg.vector_norm(g).double() for _, g in counted]).tolist() if counted else []
        mine = [(at, norm, str(g.dtype).removeprefix("torch.")) for (at, g), norm in zip(counted, norms, strict=True)]
        self._told[step] = mine
        self._kept.keep(step, mine)
        self._tell(step, mine)

    def _tell(self, step: int, mine: Norms) -> None:
        # What nobody waits for might come when this deployment is over, and be taken for the next one's.
        for rank in self._ranks if step + self._delay in self._steps else ():
            self._plane.post(rank, GradientNorms(step, self._stage, mine))

    def factor(self, step: int, gradients: Gradients, positions: Sequence[int | None], deadline: float) -> torch.Tensor:
        """Factor for the gradients of a step, whose norms it tells unless ``tell`` has. Raises DeadlineError."""
        if step not in self._told:
            self.tell(step, gradients, positions)
        mine = self._told.pop(step)
        of = step - self._delay
        others: dict[int, Norms] = {}
        if of in self._steps or of in self._known:
            until = time.monotonic() + deadline
            while len(self._norms.get(of, ())) < self._stages - 1:
                self._wait(of, until, deadline)
            others = self._norms.pop(of, {})
        every = sorted(norm for norms in (mine, *others.values()) for norm in norms)
        if not every:
            return torch.tensor(1.0)
        total = torch.linalg.vector_norm(torch.stack(_as_torch_adds_them(every)))
        return torch.clamp(self._most / (total + _EPSILON), max=1.0)

    def _wait(self, of: int, until: float, deadline: float) -> None:
        """Take one message, or look whether the run goes on."""
        try:
            found = wait_for(self._plane, self._heard, _LOOK, "the norms of gradients")
        except DeadlineError:
            if time.monotonic() > until:
                raise DeadlineError(
                    f"waited {deadline:.0f} s for the norms of step {of + 1}'s gradients from the other stages"
                ) from None
            return
        self._norms.setdefault(found.step, {})[found.stage] = found.norms


def known_to_all(messenger: Messenger, kept: KeptNorms | None, steps: range, deadline: float) -> set[int]:
    """Those of ``steps`` of which all stages have kept their norms; all ranks call this together, those without a stage with
    None. Raises DeadlineError."""
    if not steps:
        return set()
    told = messenger.allgather(None if kept is None else sorted(kept.of), deadline, "the last norms of gradients")
    return set(steps).intersection(*(mine for mine in told if mine is not None))


def _as_torch_adds_them(norms: Norms) -> list[torch.Tensor]:
    """Norms, given in the order of the model's parameters, in the order in which torch adds them: gradients of one dtype
    after another, and the dtypes in an order that torch's own function finds."""
    kinds = [getattr(torch, kind) for _, _, kind in norms]
    like: list[list[torch.Tensor | None]] = [[torch.empty(0, dtype=kind) for kind in kinds]]
    groups = _group_tensors_by_device_and_dtype(like, with_indices=True).values()
    order = [n for _, indices in groups for n in indices]
    return [torch.tensor(norms[n][1], dtype=kinds[n].to_real()) for n in order]


def positions(order: dict[str, int], stage: int, names: Sequence[str], counted: Sequence[bool]) -> list[int | None]:
    """Positions of a stage's trained parameters in the model; None for a copy of a parameter that an earlier stage has, too
    (not ``counted``). ``order``: the model's, if it is not that of its layers."""
    each = enumerate(zip(names, counted, strict=True))
    return [(order.get(name, (stage << 32) + n) if counts else None) for n, (name, counts) in each]
