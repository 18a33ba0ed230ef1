"""A device slows down: a new plan is proposed where it pays, and not for noise, for a moment, or too late."""

import msgspec
import numpy as np
import pytest
from clusters import cluster, job

from accept_mpi.logs.format import KINDS, TRACE, Rows
from accept_mpi.plan import BoundaryCodecs, Plan, make_plan, recomputing
from accept_mpi.planning.adaptation import WINDOW, Adapter
from accept_mpi.planning.estimate import estimate, fits, forecast_of
from accept_mpi.planning.planner import plan_for
from accept_mpi.profiling.cluster_profile import ClusterProfile

STEPS = 1000


class Run:
    """Stages that compute as the survey says, times a factor each, step by step."""

    def __init__(self, *speeds: float, adapt: str = "true", made: int = 0) -> None:
        self.job = job("train.steps=1000", f"pipeline.adapt={adapt}")
        self.cluster = cluster(*speeds)
        self.plan = plan_for(self.cluster, self.job).plan
        self.asked = 0
        self.made = made
        self.now = 0.0
        self.begin(self.cluster)

    def begin(self, cluster: ClusterProfile) -> None:
        """A deployment begins."""
        self.adapter = Adapter(self.job, STEPS, self.plan, cluster, self._ask)

    def _ask(self) -> None:
        self.asked += 1

    def steps(self, count: int, *factors: float, noise: float = 0.0, together: int = 1) -> Plan | None:
        """So many steps, whose traces come ``together``; the plan that is proposed, if one is."""
        rng = np.random.default_rng(self.made)
        waiting: dict[int, list[Rows]] = {s: [] for s in range(len(self.plan.stages))}
        for number in range(count):
            self.made += 1
            took = []
            for s, stage in enumerate(self.plan.stages):
                rank = stage.leader
                times = factors[rank] * (1 + noise * rng.uniform(-1, 1))
                rows = self.rows(s, stage.stop - stage.start, times * self.cluster.devices[rank].forward[0])
                took.append(rows["end"][-1] - self.now)
                waiting[s].append(rows)
            self.now += max(took)
            if (number + 1) % together == 0:
                for s, all_rows in waiting.items():
                    self.adapter.trace(np.concatenate(all_rows))
                    waiting[s] = []
        return self.adapter.proposal.plan if self.adapter.proposal else None

    def rows(self, stage: int, layers: int, seconds: float) -> Rows:
        """A step of 8 micro-batches of a stage whose layers take so long forward, twice as long back."""
        rank, found, at = self.plan.stages[stage].leader, [], self.now
        for k in range(8):
            for kind, each in (("F", 1), ("B", 2)):
                place = (rank, stage, KINDS.index(kind), -1, -1, self.made, k, 0, 0, 0)
                found.append((at, at + layers * each * seconds, *place))
                at = found[-1][1]
        return np.array(found, TRACE)


def layers(plan: Plan | None) -> list[int]:
    assert plan is not None
    return [len(plan.layers_of(rank)) for rank in range(3)]


def test_a_slower_device_gives_layers_away_and_gets_them_back() -> None:
    run = Run(1, 1, 1)
    assert layers(run.plan) == [4, 4, 4]
    assert run.steps(4 * WINDOW, 1, 1, 1) is None
    found = run.steps(3 * WINDOW, 1, 10, 1)
    assert layers(found) in ([6, 0, 6], [6, 1, 5], [5, 1, 6])
    assert run.asked == 1
    assert run.adapter.proposal is not None
    assert "rank 1 takes 10 x" in run.adapter.proposal.text
    # Its survey knows the device as it is now; when it recovers, that is found against it.
    run.plan, run.cluster = run.adapter.proposal.plan, run.adapter.proposal.cluster
    if layers(run.plan)[1]:
        run.begin(run.cluster)
        assert run.adapter.proposal is None


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_moves_nothing(noise: float) -> None:
    run = Run(1, 1, 1)
    assert run.steps(40 * WINDOW, 1, 1, 1, noise=noise) is None


def test_a_moment_moves_nothing() -> None:
    """One window in which a device had something else to do."""
    run = Run(1, 1, 1)
    for _ in range(5):
        assert run.steps(3 * WINDOW, 1, 1, 1) is None
        assert run.steps(WINDOW - 1, 1, 8, 1) is None


def test_a_small_change_moves_layers_when_it_has_lasted() -> None:
    """Half as slow again: 15 to 20 % of a step, which moving costs several steps to win. A while of it moves nothing."""
    run = Run(1, 1, 1)
    for _ in range(5):
        assert run.steps(3 * WINDOW, 1, 1, 1) is None
        assert run.steps(3 * WINDOW, 1, 1.5, 1) is None
    assert layers(run.steps(40 * WINDOW, 1, 1.5, 1))[1] < 4


def test_traces_of_many_short_steps() -> None:
    """All of them count, none is kept for long, and the planner is asked once a trace."""
    run = Run(1, 1, 1)
    assert run.steps(20 * WINDOW, 1, 1, 1, together=20) is None
    assert sum(map(len, run.adapter._rows)) <= 2 * WINDOW * 3 * 16
    assert run.steps(20, 1, 1.5, 1, together=20) is None
    assert layers(run.steps(40 * WINDOW, 1, 1.5, 1, together=20))[1] < 4
    run = Run(1, 1, 1)
    assert run.steps(20 * WINDOW, 1, 1, 1, together=20) is None
    assert layers(run.steps(20, 1, 10, 1, together=20))[1] <= 1


def test_what_is_lost_is_not_looked_at_for_long() -> None:
    """Where two steps have lost what moving costs, two are enough; a third where the first began before the change."""
    run = Run(20, 20, 20)
    assert run.steps(3 * WINDOW, 1, 1, 1) is None
    assert run.steps(1, 1, 10, 1) is None
    assert layers(run.steps(1, 1, 10, 1))[1] <= 1
    run = Run(20, 20, 20)
    assert run.steps(3 * WINDOW, 1, 1, 1) is None
    assert run.steps(2, 1, 2.5, 1) is None
    assert layers(run.steps(WINDOW - 2, 1, 2.5, 1))[1] < 4


def test_the_first_steps_of_a_plan_are_slow() -> None:
    run = Run(20, 20, 20)
    assert run.steps(WINDOW, 1, 4, 1) is None
    assert run.steps(3 * WINDOW, 1, 1, 1) is None


def test_what_does_not_pay_any_more_is_left() -> None:
    run = Run(1, 1, 1)
    run.made = STEPS - 4 * WINDOW
    assert run.steps(4 * WINDOW - 1, 1, 2, 1) is None


def test_unequal_from_the_beginning() -> None:
    """A plan for equal devices of which one was always slower: found after two windows."""
    run = Run(1, 1, 1)
    found = run.steps(3 * WINDOW + 3, 1, 3, 1)
    assert layers(found)[1] < 4
    assert run.made <= 3 * WINDOW + 3


def test_an_idle_device_that_recovers_gets_layers() -> None:
    run = Run(1, 40, 1)
    assert run.plan.place(1).idle
    assert run.steps(4 * WINDOW, 1, 1, 1) is None
    run.adapter.speed(1, 1.1)
    assert run.steps(3 * WINDOW, 1, 1, 1) is None
    run.adapter.speed(1, 0.1)  # in the midst of its recovery
    assert run.steps(WINDOW, 1, 1, 1) is None
    run.adapter.speed(1, 1 / 40)
    assert run.steps(WINDOW, 1, 1, 1) is None
    for _ in range(3):
        run.adapter.speed(1, 1 / 40)
    assert layers(run.steps(3 * WINDOW, 1, 1, 1)) in ([4, 4, 4], [4, 5, 3], [3, 5, 4])


def test_a_device_that_was_taken_for_slower_than_it_was_recovers_wholly() -> None:
    """Its stage took 16 x while it was slow, its pulse 10 x: when the pulse is back at 1, so is the device."""
    run = Run(1, 1, 1)
    assert run.steps(3 * WINDOW, 1, 16, 1)
    assert run.adapter.proposal
    run.plan, slow = run.adapter.proposal.plan, run.adapter.proposal.cluster
    assert slow.devices[1].factor == pytest.approx(16, rel=0.1)
    run.begin(slow)
    for beat in (10.0, 1.0, 1.0):
        run.adapter.speed(1, beat)
    run.cluster = slow
    found = run.steps(6 * WINDOW, 1, 1 / 16, 1)
    assert layers(found) in ([4, 4, 4], [4, 5, 3], [3, 5, 4])
    assert run.adapter.proposal.cluster.devices[1].factor == 1


def test_what_a_pulse_does_not_see_is_not_taken_for_a_recovery() -> None:
    """Its memory is slow, not its arithmetic."""
    run = Run(1, 1, 1)
    assert run.steps(3 * WINDOW, 1, 16, 1)
    assert run.adapter.proposal
    run.plan, run.cluster = run.adapter.proposal.plan, run.adapter.proposal.cluster
    run.begin(run.cluster)
    for _ in range(3):
        run.adapter.speed(1, 1.0)
    assert run.steps(6 * WINDOW, 1, 1, 1) is None


def test_a_stage_with_little_to_do_does_not_say_how_fast_its_device_is() -> None:
    """Under a CPU quota it looks as fast as it likes; the device's own pulse counts."""
    run = Run(1, 4, 1)
    run.plan = make_plan(12, [6, 7], [BoundaryCodecs()] * 2)
    run.begin(run.cluster)
    assert run.steps(6 * WINDOW, 1, 1 / 4, 1) is None
    for beat in (1.0, 1 / 4, 1 / 4):
        run.adapter.speed(1, beat)
    assert layers(run.steps(3 * WINDOW, 1, 1 / 4, 1))[1] > 2


def test_a_device_that_was_assumed_is_known_once_it_had_enough_to_do() -> None:
    """Else a slow one that gets a layer looks fast, gets more, and so on."""
    run = Run(1, 1, 1)
    devices = [msgspec.structs.replace(device, assumed=n > 0) for n, device in enumerate(run.cluster.devices)]
    run.begin(msgspec.structs.replace(run.cluster, devices=devices))
    assert run.steps(3 * WINDOW, 1, 10, 1)
    assert run.adapter.proposal
    assert [device.assumed for device in run.adapter.proposal.cluster.devices] == [False, False, True]


def test_all_that_a_slow_device_does_is_slow() -> None:
    # Messages, too: a device at a tenth of its speed was given layers that paid only if it still sent them as fast.
    run = Run(1, 1, 1)
    run.cluster.devices[1] = msgspec.structs.replace(
        run.cluster.devices[1], seconds_per_message=1e-3, seconds_per_byte=1e-9, encode={"none": 1e-10}
    )
    run.begin(run.cluster)
    proposal = run.adapter.propose({0: 1.0, 1: 10.0, 2: 1.0}, STEPS)
    assert proposal is not None
    slow = proposal.cluster.devices[1]
    assert slow.seconds_per_message == pytest.approx(1e-2)
    assert slow.seconds_per_byte == pytest.approx(1e-8)
    assert slow.encode["none"] == pytest.approx(1e-9)
    assert proposal.cluster.devices[0] == run.cluster.devices[0]


def test_a_period_begins_with_the_plan() -> None:
    """Resumed at step 100, or after a loss there: not at once."""
    run = Run(1, 1, 1, adapt="30", made=100)
    assert run.steps(29, 1, 3, 1) is None
    assert layers(run.steps(WINDOW + 2, 1, 3, 1))[1] < 4


def test_nothing_is_sought_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan was sought every five steps, on the thread that computes rank 0's stage."""
    run, sought = Run(1, 1, 1), []
    monkeypatch.setattr("accept_mpi.planning.adaptation.plan_for", lambda *given: sought.append(1) or plan_for(*given))
    assert run.steps(40 * WINDOW, 1, 1, 1, noise=0.05) is None
    assert len(sought) <= 3
    assert run.steps(3 * WINDOW, 1, 10, 1) is not None


def test_a_fixed_period() -> None:
    """FTPipeHD: at once when it is time, and not before."""
    run = Run(1, 1, 1, adapt="30")
    assert run.steps(29, 1, 3, 1) is None
    assert layers(run.steps(WINDOW + 2, 1, 3, 1))[1] < 4


def test_computing_a_forward_again_does_not_look_slow() -> None:
    asked, fleet = job("pipeline.schedule=1f1b", "pipeline.adapt=true"), cluster(1, 1, 1)
    plan = recomputing(make_plan(12, [4, 8], [BoundaryCodecs()] * 2), [0, 1])
    adapter = Adapter(asked, STEPS, plan, fleet, lambda: None)
    rows = forecast_of(fleet, asked, plan).trace(plan.codecs, [0, 1, 2])
    computing = rows[np.isin(rows["kind"], [KINDS.index(kind) for kind in "FB"])]
    assert adapter.factors(computing) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0})


def test_a_member_that_takes_no_micro_batches_shows_its_speed_by_its_pulse() -> None:
    """Of a group's steps none are there of it, so nothing else tells that it has recovered."""
    asked, fleet = job("pipeline.groups=true", "pipeline.adapt=true"), cluster(1, 16, 1)
    plan = make_plan(12, [8], [BoundaryCodecs()], [[0, 1], 2], [[1.0, 16.0], [1.0]])
    adapter = Adapter(asked, STEPS, plan, fleet, lambda: None)
    rows = forecast_of(fleet, asked, plan).trace(plan.codecs, [0, 1, 2])
    computing = rows[np.isin(rows["kind"], [KINDS.index(kind) for kind in "FB"])]
    assert set(computing["rank"].tolist()) == {0, 2}
    assert adapter.factors(computing) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0})
    for beat in (10.0, 1.0, 1.0):
        adapter.speed(1, beat)
    assert adapter.factors(computing) == pytest.approx({0: 1.0, 1: 0.1, 2: 1.0})


def test_another_deal_must_fit() -> None:
    """A group with a far slower member has more micro-batches in flight."""
    asked = job("pipeline.groups=true", "pipeline.adapt=true")
    plan = make_plan(12, [8], None, [[0, 1], 2], [[1.0, 1.0], [1.0]])
    room = [1.02 * need for need in estimate(cluster(1, 1, 1), asked, plan).memory]
    fleet = cluster(1, 1, 1, of=asked, rate=1e7, memory=room)
    found = Adapter(asked, STEPS, plan, fleet, lambda: None).propose({0: 1.0, 1: 6.0, 2: 1.0}, 10**6)
    assert found
    assert fits(found.cluster, estimate(found.cluster, asked, found.plan))


def test_a_rank_is_called_what_it_was_called_before_a_loss() -> None:
    asked, fleet = job("pipeline.adapt=true"), cluster(1, 1, 1)
    plan = plan_for(fleet, asked).plan
    found = Adapter(asked, STEPS, plan, fleet, lambda: None, [0, 2, 3]).propose({0: 1.0, 1: 9.0, 2: 1.0}, 10**6)
    assert found
    assert found.text.startswith("rank 2 takes 9 x what it took")
