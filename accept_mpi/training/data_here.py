"""The data set, on the ranks that can load it."""

import numpy as np

from accept_mpi.comm.runtime import Runtime
from accept_mpi.data import Dataset, fetch
from accept_mpi.data import of_job as data_of
from accept_mpi.data.feed import checksum
from accept_mpi.errors import Agreed, UserError
from accept_mpi.job import Job

Data = tuple[Dataset | None, Dataset | None]
"""Training and test set; (None, None) where they are not."""


def load_here(runtime: Runtime, job: Job, have: Data = (None, None)) -> tuple[Data, int]:
    """Load the data if this rank can and does not ``have`` them. Returns them and the first rank that has them. All ranks
    call this together. Raises Agreed if none has."""
    data, error = have, None
    if data[0] is None:
        try:
            data = data_of(job)
        except UserError as mistake:
            error = str(mistake)
    errors = runtime.messenger.allgather(error, runtime.startup_seconds, "the data")
    if None not in errors:
        raise Agreed(str(errors[0]))
    return data, errors.index(None)


def agree_on_data(runtime: Runtime, data: Data) -> tuple[int, int]:
    """Numbers of training and test samples, from the ranks that have them; all call this together. Raises Agreed if the
    first and the last stage have different data."""
    mine = None
    if data[0] is not None and data[1] is not None:
        some = np.arange(min(64, len(data[0])))
        mine = [len(data[0]), len(data[1]), checksum(fetch(data[0], some, 0, inputs=False, targets=True).targets)]
    found = [d for d in runtime.messenger.allgather(mine, runtime.startup_seconds, "the sizes of the data") if d]
    if any(other != found[0] for other in found):
        raise Agreed(
            "data.name: the first and the last stage's hosts have different data: "
            f"{found[0][0]} and {found[0][1]} samples on rank 0, {found[-1][0]} and {found[-1][1]} on the last, "
            "or other targets; give both the same files, and let the data set draw with torch's, NumPy's or Python's global "
            "random numbers, which are seeded for each sample",
        )
    return found[0][0], found[0][1]
