"""Data sets: a small zoo, and the user's own by import path."""

from collections.abc import Mapping
from typing import Any

from accept_mpi.data.base import ArrayDataset, Dataset, Loader, MapDataset, Samples, adapt, classes_of, fetch, gives_targets
from accept_mpi.data.cifar10 import cifar10
from accept_mpi.data.digits import digits
from accept_mpi.data.hdf5 import hdf5
from accept_mpi.data.images import images
from accept_mpi.data.mixing import Mixed
from accept_mpi.data.text import check_vocabulary, text
from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.registry import call, find_function
from accept_mpi.users_code import in_words

__all__ = [
    "ZOO", "ArrayDataset", "Dataset", "MapDataset", "Samples", "classes_of", "fetch", "gives_targets", "load", "of_job",
]  # fmt: skip

ZOO: dict[str, Loader] = {"digits": digits, "text": text, "cifar10": cifar10, "images": images, "hdf5": hdf5}


def of_job(job: Job) -> tuple[Dataset, Dataset]:
    """Training and test set of a job. Raises UserError with one sentence."""
    train, test = load(job.data.name, job.data.args, job.model)
    return (Mixed(train, job.train.mix) if job.train.mix else train), test


def load(name: str, args: Mapping[str, Any], model: Any = None) -> tuple[Dataset, Dataset]:
    """Training and test set that a job names. Raises UserError with one sentence, also if a text has more symbols than
    ``model`` (the job's ``job.Model``) knows.

    The seed is always the same: a run with another ``train.seed`` is another run on the same data.
    """
    function = find_function(name, ZOO, "data.name")
    result = call(function, args, "data.args", seed=0)
    try:
        if isinstance(result, Mapping):
            raise TypeError
        train, test = result
    except (TypeError, ValueError):
        raise UserError(f'data.name: "{name}" must return (train, test), got {type(result).__name__}') from None
    try:
        whole = model is not None and model.output == "loss"
        if test is None:
            raise TypeError("it gives no test set; give the training set twice, and train.evaluate_every = 0")
        adapted = adapt(train, whole), adapt(test, whole)
    except (TypeError, ValueError) as error:
        raise UserError(f'data.name: "{name}": {error}') from error
    for which, data in zip(("training", "test"), adapted, strict=True):
        if _length(data, f'the {which} set of "{name}"') == 0:
            raise UserError(f'data.name: the {which} set of "{name}" is empty')
    if model is not None:
        check_vocabulary(train, model.name, model.args)
    return adapted


def _length(data: Dataset, which: str) -> int:
    """Number of samples. Raises UserError: a user's data set may look for its files only now, and another host has them."""
    try:
        return len(data)
    except Exception as error:
        raise UserError(f"data.name: {which} tells no length: {in_words(error)}") from error
