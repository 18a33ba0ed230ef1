"""How OpenMP's threads wait, as torch's library says itself: it is told before torch is imported."""

import platform
import re
import subprocess
import sys

import pytest
from conftest import HANGS, ROOT, environment


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere libgomp's own choice stays")
@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, r"3000"), ({"GOMP_SPINCOUNT": "77"}, r"77"), ({"OMP_WAIT_POLICY": "active"}, r"\d{10,}")],
    ids=["by default", "as the user says", "actively"],
)
def test_turns_of_the_waiting_loop(given: dict[str, str], spins: str) -> None:
    known = {name: value for name, value in environment().items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-m", "accept_mpi", "bench", "codec", "bf16", "--sizes", "4K", "--repeats", "1"],
        cwd=ROOT,
        env=known | {"OMP_DISPLAY_ENV": "verbose"} | given,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"GOMP_SPINCOUNT = '(.*)'", done.stderr)
    assert found
    assert all(re.fullmatch(spins, one) for one in found)
