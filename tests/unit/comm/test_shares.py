"""Who compiles which kernels for whom."""

from hypothesis import given
from hypothesis import strategies as st

from accept_mpi.comm.machine_code import SECONDS, Has, Sent, shares

A, B = ("machine a", 1, 2), ("machine b", 1, 2)


def test_equal_hosts_share_the_work() -> None:
    ranks = [Has("v", A, (), ("search", "simulator", "uniform")), *[Has("v", B, (), ("uniform",))] * 2]
    assert shares(ranks) == [Sent("uniform", 0, (1, 2)), Sent("search", 1, (0,)), Sent("simulator", 2, (0,))]


def test_who_is_busy_compiles_less() -> None:
    ranks = [Has("v", A, (), ("search", "uniform"), busy=1.5), Has("v", B, (), ("uniform",))]
    assert shares(ranks) == [Sent("uniform", 1, (0,)), Sent("search", 0, ())]


def test_who_has_it_sends_it() -> None:
    ranks = [Has("v", A, (), ("half", "uniform")), Has("v", B, ("uniform",), ("half",))]
    assert shares(ranks) == [Sent("uniform", 1, (0,)), Sent("half", 0, (1,))]


def test_other_processors_and_who_takes_no_part_are_of_no_use() -> None:
    ranks = [Has("v", A, (), ("half",)), Has("w", B, ("half",), ()), Has("w", B, (), ("uniform",)), Has()]
    assert shares(ranks) == [Sent("half", 0, ()), Sent("uniform", 1, (2,))]


MODULES = st.sets(st.sampled_from([*SECONDS, "new"]))


@given(st.lists(st.tuples(st.sampled_from(["", "v", "w"]), MODULES, MODULES), min_size=1, max_size=6))
def test_whatever_is_lacked_comes_from_one_rank_of_the_kind(drawn) -> None:
    ranks = [Has(kind, A, tuple(here), tuple(wants - here)) if kind else Has() for kind, here, wants in drawn]
    found = shares(ranks)
    for number, rank in enumerate(ranks):
        for module in rank.lacks:
            (one,) = [one for one in found if one.module == module and ranks[one.source].version == rank.version]
            assert number == one.source or number in one.receivers
    for one in found:
        assert one.source not in one.receivers
        assert all(one.module in ranks[number].lacks for number in one.receivers)
        anyone = any(one.module in rank.here for rank in ranks if rank.version == ranks[one.source].version)
        assert (one.module in ranks[one.source].here) == anyone
