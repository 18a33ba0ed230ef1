"""The choice of codecs: mild where links are fast, strong where they are slow, never below the floor."""

import msgspec
import pytest

from accept_mpi.codecs.coding import parse
from accept_mpi.codecs.message import wire_bytes
from accept_mpi.codecs.tensors import TensorSpec
from accept_mpi.direction import Crossing, Direction
from accept_mpi.pipeline.schedule import ScheduleKind
from accept_mpi.planning.codec_choice import choose, ladder
from accept_mpi.planning.forecast import Forecast
from accept_mpi.planning.message_model import Traffic
from accept_mpi.profiling.cluster_profile import StageTimes
from accept_mpi.profiling.outline import crossing_sizes

NAMES = [*ladder(1, entropy=True), "fp16"]
FREE = dict.fromkeys(NAMES, 0.0)
VALUES = 125_000  # 0.5 MB


def profiles(*seconds: float, coding: dict[str, float] | None = None) -> list[StageTimes]:
    """Stages that take so long a micro-batch, a third of it forward."""
    return [StageTimes(t / 3, 2 * t / 3, coding or FREE, coding or FREE) for t in seconds]


def crossings(*rates: float) -> dict[Crossing, Traffic]:
    """Boundaries of 0.5 MB each way with these rates in bytes/s."""
    return {(b, way): Traffic(VALUES, 64, rate) for b, rate in enumerate(rates) for way in Direction}


def names(
    kind: ScheduleKind,
    profiled: list[StageTimes],
    crossing: dict[Crossing, Traffic],
    floor: int = 2,
    micro_batches: int = 32,
    fixed: dict[Crossing, str] | None = None,
    entropy: bool = False,
) -> dict[Crossing, str]:
    forecast = Forecast(kind, micro_batches, 2, profiled, crossing)
    choices, _ = choose(forecast, fixed or {}, list(ladder(floor, entropy)))
    return {place: choice.name for place, choice in choices.items()}


def test_a_fast_link_is_not_coded() -> None:
    assert set(names("1f1b-async", profiles(0.06, 0.06), crossings(1e9)).values()) == {"none"}


@pytest.mark.parametrize("kind", ["1f1b", "1f1b-async", "gpipe", "zero-bubble"])
def test_bits_fall_with_the_rate_and_stop_at_the_floor(kind: ScheduleKind) -> None:
    ladder_2 = list(ladder(2))
    positions = []
    for rate in (1e9, 1e7, 3e6, 1e6, 1e5, 1e3):
        chosen = names(kind, profiles(0.06, 0.06), crossings(rate))
        positions.append(sum(ladder_2.index(name) for name in chosen.values()))
    assert positions == sorted(positions)
    assert positions[0] < positions[-1]
    assert set(names(kind, profiles(0.06, 0.06), crossings(1e3)).values()) == {"uniform:2"}
    assert set(names(kind, profiles(0.06, 0.06), crossings(1e3), floor=4).values()) == {"uniform:4"}
    assert set(names(kind, profiles(0.06, 0.06), crossings(1e3), floor=1).values()) == {"mbq:1"}


def test_entropy_codes_are_milder_than_even_bits_and_cost_more() -> None:
    """Only where a job allows them, and not where a device has no time for them."""
    link, free = crossings(1e3), profiles(0.06, 0.06)
    every = names("1f1b", free, link, entropy=True)  # as many bits as "uniform:2"
    assert every == {(0, Direction.FORWARD): "entropy:2.5+basis", (0, Direction.BACKWARD): "entropy:2.5"}
    milder = {way: name for (_, way), name in names("1f1b", free, link, 4, entropy=True).items()}
    assert milder == {Direction.FORWARD: "entropy:4.5+basis", Direction.BACKWARD: "entropy:4.5"}
    no_basis = profiles(0.06, 0.06, coding=FREE | {f"entropy:{bits}+basis": 5e-7 for bits in (4.5, 3.5, 2.5)})
    assert names("1f1b", no_basis, crossings(1.3e6), entropy=True)[0, Direction.FORWARD].startswith("entropy:")
    many = names("1f1b", profiles(*[0.06] * 34), crossings(*[1e3] * 33), entropy=True)
    assert {name for (_, way), name in many.items() if way is Direction.BACKWARD} == {"entropy:2.5"}
    some = crossings(1.7e6)
    assert any(name.startswith("entropy") for name in names("1f1b-async", free, some, entropy=True).values())
    slow = FREE | {f"entropy:{bits}{basis}": 5e-7 for bits in (4.5, 3.5, 2.5) for basis in ("", "+basis")}
    chosen = names("1f1b-async", profiles(0.06, 0.06, coding=slow), some, entropy=True)
    assert not any(name.startswith("entropy") for name in chosen.values())


def test_only_the_slow_boundary_is_coded() -> None:
    chosen = names("1f1b-async", profiles(0.06, 0.06, 0.06), crossings(1e9, 2e6))
    assert {chosen[0, way] for way in Direction} == {"none"}
    assert "none" not in {chosen[1, way] for way in Direction}


def test_a_transfer_hides_behind_the_slowest_stage() -> None:
    """10 MB/s: 50 ms a message uncoded. Behind 20 ms it shows, behind 100 ms it does not."""
    assert "none" not in set(names("1f1b-async", profiles(0.02, 0.02), crossings(1e7)).values())
    assert set(names("1f1b-async", profiles(0.02, 0.12), crossings(1e7)).values()) == {"none"}


def test_filling_an_asynchronous_pipeline_wants_no_fewer_bits() -> None:
    """It happens once in many steps, however few micro-batches those have: 12.5 ms a message with 8 bits behind 60."""
    chosen = names("1f1b-async", profiles(0.06, 0.06, 0.06, 0.06), crossings(1e7, 1e7, 1e7), micro_batches=4)
    strong = {"uniform:6", "uniform:4", "uniform:3", "uniform:2"}
    assert not strong & set(chosen.values()), chosen


def test_what_the_job_names_stays() -> None:
    """And what is not named gets what hides behind it: a slow fp16 one way leaves time the other way."""
    chosen = names("1f1b", profiles(0.06, 0.06), crossings(1e3), fixed={(0, Direction.FORWARD): "fp16"})
    assert chosen == {(0, Direction.FORWARD): "fp16", (0, Direction.BACKWARD): "uniform:8"}


def test_a_codec_that_costs_more_than_it_saves_is_not_chosen() -> None:
    """Coding takes 10 us a value: 1.25 s for what the link carries in 0.5 s."""
    slow = {name: 0.0 if name == "none" else 5e-6 for name in NAMES}
    assert set(names("1f1b", profiles(0.06, 0.06, coding=slow), crossings(1e6)).values()) == {"none"}


def test_ids_are_counted_and_never_coded() -> None:
    ids = {(0, Direction.FORWARD): Traffic(0, 4096, 1e6), (0, Direction.BACKWARD): Traffic(VALUES, 64, 1e9)}
    choices, _ = choose(Forecast("1f1b", 8, 2, profiles(0.06, 0.06), ids), {}, list(ladder(2)))
    assert choices[0, Direction.FORWARD].seconds == pytest.approx(4096e-6)


def test_where_the_core_is_shared_moving_bytes_costs_time() -> None:
    """20 ns a byte on an endless link: 0.5 MB each way take as long as the stage computes; coding costs 1 ms."""
    coding = {name: 0.0 if name == "none" else 4e-9 for name in NAMES}
    shared = [msgspec.structs.replace(p, seconds_per_byte=2e-8, shared=True) for p in profiles(0.02, 0.02, coding=coding)]
    link = crossings(1e12)
    chosen = names("1f1b-async", shared, link)
    assert "none" not in chosen.values(), chosen
    alone = [msgspec.structs.replace(p, shared=False) for p in shared]
    assert set(names("1f1b-async", alone, link).values()) == {"none"}
    forecast = Forecast("1f1b-async", 32, 2, shared, link)
    _, uncoded = choose(forecast, dict.fromkeys(link, "none"), list(ladder(2)))
    _, chosen_step = choose(forecast, {}, list(ladder(2)))
    assert uncoded > 1.3 * chosen_step


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64"])
@pytest.mark.parametrize("name", ["none", "bf16", "fp16", "uniform:8", "uniform:4", "entropy:4.5", "mbq:1"])
def test_traffic_has_the_bytes_of_messages(dtype: str, name: str) -> None:
    specs = TensorSpec((1 << 14,), (1,), dtype), TensorSpec((1 << 10,), (1,), "int32"), TensorSpec.of(None)
    found = Traffic.of(crossing_sizes(specs), 1e6).nbytes(name)
    assert found == pytest.approx(wire_bytes(specs, parse(name, False)), rel=2e-3)  # tensors are padded to 64 bytes
