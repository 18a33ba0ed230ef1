"""The plan that a job itself gives: cuts, ranks and codecs."""

from accept_mpi import config
from accept_mpi.bits import AUTO
from accept_mpi.coding import parse
from accept_mpi.errors import UserError
from accept_mpi.plan import Codec, Plan, even_cuts, make_plan


def given_plan(job: config.Job, layers: int, size: int) -> Plan:
    """The plan that a job's cuts and ranks ask for, of ``size`` ranks. Raises UserError with one sentence."""
    ranks = job.pipeline.ranks or list(range(size))
    if wrong := [rank for rank in ranks if rank >= size or ranks.count(rank) > 1]:
        raise UserError(
            f"pipeline.ranks: rank {wrong[0]} of {ranks} comes twice or is not among the {size} ranks of this run"
        )
    if len(ranks) > layers:
        raise UserError(
            f"{len(ranks)} ranks for a model of {layers} layers: each stage needs a layer; "
            f"start mpirun with -n {layers} at most"
        )
    codecs = _codecs(job, len(ranks) - 1)
    cuts = job.pipeline.cuts
    if isinstance(cuts, str):  # one rank has nothing to choose
        return make_plan(layers, even_cuts(layers, len(ranks)), codecs, ranks)
    if len(cuts) != len(ranks) - 1:
        raise UserError(f"pipeline.cuts: {cuts} makes {len(cuts) + 1} stages, but there are {len(ranks)} ranks")
    try:
        return make_plan(layers, cuts, codecs, ranks)
    except ValueError as error:
        raise UserError(f"pipeline.cuts: {error}") from error


def _codecs(job: config.Job, boundaries: int) -> list[Codec]:
    """The codec of each boundary, both ways. Raises UserError with one sentence."""
    names = []
    for key, asked, gradients in (("forward", job.pipeline.forward, False), ("backward", job.pipeline.backward, True)):
        each = [asked] * boundaries if isinstance(asked, str) else asked
        if len(each) != boundaries:
            raise UserError(f"pipeline.{key}: {len(each)} codecs for {boundaries} boundaries; give one for all, or one each")
        for name in each if boundaries else [asked] if isinstance(asked, str) else []:
            try:
                if name != AUTO:
                    parse(name, gradients)
            except ValueError as error:
                raise UserError(f"pipeline.{key}: {error}") from error
        names.append(each)
    return [Codec(forward=forward, backward=backward) for forward, backward in zip(*names, strict=True)]
