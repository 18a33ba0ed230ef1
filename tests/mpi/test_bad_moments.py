"""What few runs would ever meet: ranks that lose each other, or end, at a bad moment."""

from pathlib import Path

import pytest
from conftest import ROOT
from losses import run


@pytest.mark.parametrize(("what", "said"), [("revoked", "heard"), ("late", "done"), ("twice", "lives")])
def test_both_ranks_come_through(tmp_path: Path, what: str, said: str) -> None:
    code, out = run(tmp_path, [ROOT / "tests" / "by_hand.py", what], "", 2)
    assert code == 0, out
    assert out.count(said) == 2, out
