"""Run under mpirun: ``train_all.py`` with short random delays wherever one thread hands something over to another, so that
what may come in another order does. The first argument seeds the delays."""

import functools
import random
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from accept_mpi.comm.ends import Receiver, Sender
from accept_mpi.comm.group_sum import GroupSum
from accept_mpi.pipeline.stage import Stage
from accept_mpi.training.gradient_sums import GradientSums
from accept_mpi.training.lanes import _Order
from accept_mpi.training.worker import Worker

_MOST = 0.03  # seconds
_SHARE = 0.15  # of all calls

numbers = random.Random(int(sys.argv.pop(1)))


def delayed(owner: type, *names: str) -> None:
    """Delay some calls of these methods, before or after what they do."""
    for name in names:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def late(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            before, after = (_MOST * numbers.random() ** 2 * (numbers.random() < _SHARE) for _ in range(2))
            time.sleep(before)
            found = plain(*args, **kwargs)
            time.sleep(after)
            return found

        setattr(owner, name, late)


delayed(Sender, "send", "move", "_begin")
delayed(Receiver, "receive", "_whole")
delayed(GroupSum, "contribute", "_pass_on", "_take")
delayed(GradientSums, "wait")
delayed(_Order, "done")
delayed(Stage, "forward", "backward", "weight_gradient")
delayed(Worker, "update")
runpy.run_path(str(Path(__file__).with_name("train_all.py")))
