"""A session's program: DistributedDataParallel over gloo, the whole model on every host, plain or with PowerSGD of rank 1.

A point has ``job``, ``tuned``, ``powersgd``, ``steps`` and ``warm``; or, instead of the last two, ``until`` (a test
accuracy) and ``seconds`` to train that far from the beginning.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from harness.peer import Setting, join, loss_of, timed, trained
from harness.session import points

_PLAIN_STEPS = 2  # PowerSGD sends gradients whole in its first steps
_ONE_BUCKET_MB = 1000
_FIRST_STEPS = 5  # of a process: memory comes from the kernel, oneDNN chooses its routines


def main() -> None:
    rank, size = join()
    built: dict[str, Any] = {}
    for point, answer in points():
        if "until" in point:
            setting, model, step = build(point, rank, size)
            whole = functools.partial(getattr, model, "module") if rank == 0 else lambda: None
            answer(trained(setting, step, whole, point["until"], point["seconds"]))
            continue
        name = json.dumps({key: point.get(key) for key in ("job", "set", "tuned", "powersgd")})
        warm = point["warm"]
        if name not in built:
            built[name] = build(point, rank, size)
            warm = max(warm, _FIRST_STEPS)
        setting, _, step = built[name]
        answer({"samples_per_s": setting.batch / timed(step, point["steps"], warm)})
    dist.destroy_process_group()


def build(point: dict[str, Any], rank: int, size: int) -> tuple[Setting, DistributedDataParallel, Callable[[], None]]:
    """Setting, model, and one step of all ranks as a function."""
    setting = Setting(point)
    # One bucket: the hook sends several times a bucket, and with more of them ranks on slow links disagree on whose turn it
    # is ("distributed collective mismatch", gloo aborts).
    bucket: dict[str, Any] = {"bucket_cap_mb": _ONE_BUCKET_MB} if point["powersgd"] else {}
    model = DistributedDataParallel(setting.layers(0, len(setting.chain)), **bucket)
    if point["powersgd"]:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=_PLAIN_STEPS)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = setting.optimizer(model)
    share = setting.batch // size
    batches = setting.batches(slice(rank * share, (rank + 1) * share))

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()

    return setting, model, step


main()
