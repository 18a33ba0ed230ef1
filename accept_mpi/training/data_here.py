"""The data set, on the ranks that can load it."""

from accept_mpi.comm.runtime import Runtime
from accept_mpi.data import Dataset
from accept_mpi.data import of_job as data_of
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
