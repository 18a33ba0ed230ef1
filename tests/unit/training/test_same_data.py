"""A start that goes on from an earlier one has its data, or says so."""

import math
from typing import Any

import msgspec
import pytest
import torch

from accept_mpi.data.checksums import Checksum, checksum
from accept_mpi.errors import UserError
from accept_mpi.recovery.manifest import Glimpse
from accept_mpi.training.same_data import check_data, glimpses


def known(*values: Any, which: str = "training") -> dict[tuple[str, int], tuple[str, Checksum]]:
    return {(which, 8 * n): ("rank 0", checksum(value)) for n, value in enumerate(values)}


def test_samples_are_compared() -> None:
    before = glimpses(known(torch.arange(3), torch.tensor([0.5, -1.0])) | known(torch.zeros(1), which="test"))
    assert [one.sample for one in before] == [0, 8]
    kept = msgspec.json.decode(msgspec.json.encode(before), type=list[Glimpse])
    assert kept == before
    rounded = torch.tensor([0.5, -1.0 + 1e-6])
    check_data(kept, known(torch.arange(3), rounded), [])
    check_data(kept, known(), [])  # samples that are others whenever they are asked for
    check_data([], known(torch.arange(3)), [])
    for other in (known(torch.arange(3).flip(0), rounded), known(torch.arange(3), -rounded)):
        with pytest.raises(UserError, match=r"^data.name: sample [08] of the training set is another one than in the run"):
            check_data(kept, other, ["train.lr=0.1", "database=1"])
        for named in ("data.name=net:data", "data.args={}", "data.args.path=x", "train.mix={ classes = 3 }", "data={}"):
            check_data(kept, other, ["train.lr=0.1", named])


def test_what_json_cannot_hold_is_left_out() -> None:
    assert glimpses({("training", 0): ("rank 0", Checksum(1, 0.0, math.inf))}) == []
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"sample": 0, "digest": "zz", "projection": 0.0, "norm": 0.0}, Glimpse)
