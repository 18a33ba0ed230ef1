"""``transfer_slack = "auto"``: micro-batches in flight that hide transfers, fewer where memory or old weights matter."""

import itertools
import re

import msgspec
import pytest
from clusters import LAYERS, cluster, job
from test_recompute_and_ties import SYNCHRONOUS, fat

from accept_mpi.errors import UserError
from accept_mpi.plan import make_plan
from accept_mpi.planning.estimate import estimate, fits
from accept_mpi.planning.planner import plan_for, plans_for
from accept_mpi.planning.tables import verdict

KEPT = "pipeline.recompute=off"
AUTO, ASYNCHRONOUS = 'pipeline.transfer_slack="auto"', "pipeline.schedule=1f1b-async"


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gpipe", "1f1b-delayed"])
def test_where_memory_is_plenty_transfers_hide_best(schedule: str) -> None:
    roomy, keys = fat(cluster(1, 1, 1), 1e12), (f"pipeline.schedule={schedule}", KEPT)
    found = plan_for(roomy, job(*keys))
    assert found.plan.slack == 2
    assert found == plan_for(roomy, job(*keys, "pipeline.transfer_slack=2"))


def test_fewer_in_flight_where_memory_is_short() -> None:
    keys = (SYNCHRONOUS, KEPT)
    plenty = plan_for(fat(cluster(1, 1, 1), 1e12), job(*keys))
    short = fat(cluster(1, 1, 1), 0.6 * max(plenty.memory))
    found, even = plans_for(short, job(*keys))
    assert found.plan.slack < 2
    assert fits(short, found)
    for slack in (0, 1, 2):  # no slack would have been faster
        try:
            other = plan_for(short, job(*keys, f"pipeline.transfer_slack={slack}"))
        except UserError:
            continue
        assert found.expected <= other.expected
    assert any(
        f"transfer_slack {found.plan.slack}), to save memory" in line for line in verdict(short, job(*keys), found, even)
    )


def test_asynchronously_too_memory_may_be_the_reason() -> None:
    keys = (ASYNCHRONOUS, KEPT)
    roomy = fat(cluster(1, 1, 1, rate=1e5), 1e12)
    found = estimate(roomy, job(*keys), make_plan(LAYERS, [4, 8], slack=1))
    short = fat(cluster(1, 1, 1, rate=1e5), 1.01 * max(found.memory))
    for fleet, why in ((roomy, "so weights are newer"), (short, "to save memory")):
        assert any(line.endswith(f"(transfer_slack 1), {why}") for line in verdict(fleet, job(*keys), found, found))
    synchronous = verdict(roomy, job(SYNCHRONOUS, KEPT), found, found)
    assert any(line.endswith("(transfer_slack 1), which is faster here") for line in synchronous)


def test_less_slack_is_tried_before_giving_up() -> None:
    keys = (SYNCHRONOUS, KEPT)
    most = max(plan_for(fat(cluster(1, 1, 1), 1e12), job(*keys)).memory)
    for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        tight = fat(cluster(1, 1, 1), share * most)
        try:
            plan_for(tight, job(*keys, "pipeline.transfer_slack=2"))
        except UserError:
            break
    found = plan_for(tight, job(*keys))
    assert found.plan.slack < 2
    assert fits(tight, found)
    with pytest.raises(UserError, match="no cuts fit"):
        plan_for(fat(cluster(1, 1, 1), 0.1 * most), job(*keys))


@pytest.mark.parametrize("rate", [1e4, 3e5, 1e6, 1e8])
def test_asynchronously_the_least_slack_that_is_as_fast(rate: float) -> None:
    fleet = fat(cluster(1, 1, 1, rate=rate), 1e12)
    found, most = (plan_for(fleet, job(ASYNCHRONOUS, slack)) for slack in (AUTO, "pipeline.transfer_slack=2"))
    assert found.expected <= 1.02 * most.expected
    for slack in range(found.plan.slack):
        fewer = msgspec.structs.replace(most.plan, slack=slack)
        assert estimate(fleet, job(ASYNCHRONOUS), fewer).expected > 1.02 * most.expected


def test_fast_links_need_no_slack_and_slow_ones_some() -> None:
    found = [plan_for(fat(cluster(1, 1, 1, rate=rate), 1e12), job(ASYNCHRONOUS)).plan for rate in (1e9, 1e5)]
    assert found[0].slack == 0
    assert len(found[1].stages) == 1 or found[1].slack > 0


def test_how_old_weights_are_is_told() -> None:
    """As in the schedule: 1F1B of three stages has three micro-batches in flight on the first, seven with a slack of 2."""
    fleet, told = cluster(1, 1, 1), {}
    for count, slack in itertools.product((1, 8), (0, 2)):
        asked = job(ASYNCHRONOUS, f"train.micro_batches={count}", f"pipeline.transfer_slack={slack}")
        found = estimate(fleet, asked, make_plan(LAYERS, [4, 8], slack=slack))
        (told[count, slack],) = (line for line in verdict(fleet, asked, found, found) if "old" in line)
    assert [re.findall(r"(\d+) on stage (\d)", line) for line in told.values()] == [
        [("2", "0"), ("1", "1")], [("6", "0"), ("3", "1")], [("1", "0"), ("1", "1")], [("1", "0"), ("1", "1")],
    ]  # fmt: skip
    assert all(line.endswith("; the newest on stage 2") for line in told.values())
    synced = job(ASYNCHRONOUS, "train.micro_batches=1", "pipeline.vertical_sync=true", "pipeline.transfer_slack=2")
    found = estimate(fleet, synced, make_plan(LAYERS, [4, 8], slack=2))
    assert "weights are up to 6 updates old" in verdict(fleet, synced, found, found)
    for cuts, ranks in (([], [(0, 1, 2)]), ([], [0])):
        found = estimate(fleet, asked, make_plan(LAYERS, cuts, ranks=ranks))
        assert not any("old" in line for line in verdict(fleet, asked, found, found))


def test_given_cuts_have_the_most() -> None:
    assert job("pipeline.cuts=[3]").pipeline.slack == 2
    assert job("pipeline.transfer_slack=5").pipeline.slack == 5
    assert job("pipeline.transfer_slack=0").pipeline.slack == 0
