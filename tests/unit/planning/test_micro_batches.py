"""train.micro_batches = "auto": which numbers are tried, and which is taken."""

import clusters
import msgspec
import pytest
from clusters import cluster

from accept_mpi.data.calendar import micro_batch_size, micro_batches_of
from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.planning.micro_batches import best_of, of_size, tried
from accept_mpi.profiling.cluster_profile import ClusterProfile


def auto(*changes: str) -> Job:
    return clusters.job("train.micro_batches=auto", *changes)


def counts(job: Job, ranks: int) -> list[int]:
    return [micro_batches_of(one) for one in tried(job, ranks)]


def test_numbers_that_are_tried() -> None:
    assert counts(clusters.job(), 3) == [8]
    assert counts(auto("train.batch_size=64", "pipeline.schedule=1f1b"), 4) == [4, 8, 16, 32]
    assert counts(auto("train.batch_size=64", "pipeline.schedule=1f1b-async"), 4) == [8, 16]
    assert counts(auto("train.batch_size=64", "pipeline.schedule=1f1b-delayed"), 4) == [11, 16]  # 11 of 6 samples, not 12
    assert counts(auto("train.batch_size=6", "pipeline.schedule=1f1b"), 4) == [3, 6]
    assert counts(auto("train.batch_size=1"), 4) == [1]
    for size in range(1, 40):
        for job in tried(auto(f"train.batch_size={size}", "pipeline.schedule=gpipe"), 5):
            assert -(-size // micro_batch_size(job)) == micro_batches_of(job)
            again = of_size(auto(f"train.batch_size={size}"), micro_batch_size(job))
            assert micro_batch_size(again) == micro_batch_size(job)


def surveys(job: Job, fixed: float, ranks: int = 3, memory: float = 1e9) -> list[tuple[Job, ClusterProfile]]:
    """Layers take ``fixed`` of the time of a whole batch for each micro-batch, and the rest by its samples."""
    found = []
    for one in tried(job, ranks):
        share = fixed + (1 - fixed) / micro_batches_of(one)
        profile = cluster(*[100 * share] * ranks, of=job, memory=[memory] * ranks)
        saved, outline = int(1e6 / micro_batches_of(one)), profile.outline
        layers = tuple(msgspec.structs.replace(layer, saved_bytes=saved) for layer in outline.layers)
        found.append((one, msgspec.structs.replace(profile, outline=msgspec.structs.replace(outline, layers=layers))))
    return found


def test_the_fastest_is_taken() -> None:
    """Without groups, a pipeline of three: what passes cost whatever their samples weighs against filling it."""
    synchronous = auto("pipeline.schedule=1f1b")
    assert [one.train.micro_batches for one, _ in surveys(synchronous, 0)] == [3, 6, 11, 16]
    found = best_of(surveys(synchronous, 0.0))
    assert found.job.train.micro_batches == 16
    assert found.line.startswith("micro-batches: 16 a step (")
    assert best_of(surveys(synchronous, 0.5)).job.train.micro_batches == 3
    assert best_of(surveys(clusters.job("pipeline.schedule=1f1b"), 0.5)).line == ""


def test_among_equally_fast_ones_weights_stay_new() -> None:
    assert best_of(surveys(auto("pipeline.schedule=1f1b-async"), 0.0)).job.train.micro_batches == 11
    assert best_of(surveys(auto("pipeline.schedule=1f1b-async"), 0.5)).job.train.micro_batches == 6


def test_what_memory_does_not_allow_is_passed_over() -> None:
    """Of three micro-batches a device of 1.5 MB holds one of four layers; of more it holds more layers."""
    job = auto("pipeline.schedule=1f1b", "pipeline.recompute=off")
    roomy, tight = (best_of(surveys(job, 0.5, memory=memory)).job.train.micro_batches for memory in (1e9, 1.5e6))
    assert roomy == 3 < tight
    with pytest.raises(UserError):
        best_of(surveys(job, 0.5, memory=1e3))


def test_given_cuts_go_with_a_given_number() -> None:
    with pytest.raises(UserError, match="goes with pipeline"):
        auto("pipeline.cuts=[3]")
