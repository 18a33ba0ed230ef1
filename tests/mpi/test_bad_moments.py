"""What few runs would ever meet: ranks that lose each other, or end, at a bad moment."""

from pathlib import Path

import pytest
from conftest import ROOT
from lost_ranks import run

PAUSES = 20  # of bad_moments.py


@pytest.mark.parametrize(("what", "said"), [("revoked", "heard"), ("late", "done"), ("twice", "lives")])
def test_both_ranks_come_through(tmp_path: Path, what: str, said: str) -> None:
    code, out = run(tmp_path, [ROOT / "tests" / "programs" / "bad_moments.py", what], "", 2)
    assert code == 0, out
    assert out.count(said) == 2, out


def test_polls_are_rare_where_they_cost_the_core_that_computes(tmp_path: Path) -> None:
    """A poll takes 0.1 ms of it, 125 a second were 3 % of a host of 0.4 core. Going through all channels takes as long
    again, and is for when there is news."""
    code, out = run(tmp_path, [ROOT / "tests" / "programs" / "bad_moments.py", "looks"], "", 2)
    assert code == 0, out
    lines = [line.split()[1:] for line in out.splitlines() if line.startswith("looks")]
    assert len(lines) == 6, out
    assert all(int(polled) <= PAUSES + 2 for polled, _, _ in lines), out  # nothing but the end of a pause makes it poll
    assert all(int(looked) <= 3 for _, looked, _ in lines), out
    usual, *_, rare = sorted({float(pause) for *_, pause in lines})
    assert rare >= 1 / 40
    assert usual < rare
    assert sum(float(pause) == rare for *_, pause in lines) == 2, out


def test_a_pair_that_is_held_up_once_keeps_its_rate(tmp_path: Path) -> None:
    """A quota stops hosts at random: of equal links of 20 Mbit/s some seemed to carry 11."""
    code, out = run(tmp_path, [ROOT / "tests" / "programs" / "bad_moments.py", "links"], "", 3)
    assert code == 0, out
    found = sorted(line.split()[1:] for line in out.splitlines() if line.startswith("links"))
    assert found == [["0.5", "1.0", "inf"], ["1.0", "inf", "1.0"], ["inf", "1.0", "0.5"]], out
