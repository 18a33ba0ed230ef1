"""A session's program: DistributedDataParallel over gloo, the whole model on every host, plain or with PowerSGD of rank 1.

A point has ``job``, ``tuned``, ``powersgd``, and the keys of ``harness.peer.serve``.
"""

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from harness.peer import Setting, Trial, loss_of, serve

_PLAIN_STEPS = 2  # first steps, in which PowerSGD sends whole gradients
_ONE_BUCKET_MB = 1000


def build(point: dict[str, Any], rank: int, size: int) -> Trial:
    """A trial of DDP with this rank's model and its share of each batch."""
    setting = Setting(point)
    # One bucket: the hook sends several times per bucket, and with more buckets ranks on slow links disagree on the order of
    # their collectives ("distributed collective mismatch", gloo aborts).
    bucket: dict[str, Any] = {"bucket_cap_mb": _ONE_BUCKET_MB} if point["powersgd"] else {}
    model = DistributedDataParallel(setting.layers(0, len(setting.chain)), **bucket)
    if point["powersgd"]:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=_PLAIN_STEPS)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = setting.optimizer(model)
    share = slice(rank * setting.batch // size, (rank + 1) * setting.batch // size)
    batches = setting.batches(share)
    part = (share.stop - share.start) * size / setting.batch  # DDP takes the mean over ranks as that over samples

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        (part * loss_of(model(inputs), targets)).backward()
        optimizer.step()

    return Trial(setting, step, lambda: model.module if rank == 0 else None)


serve(build)
