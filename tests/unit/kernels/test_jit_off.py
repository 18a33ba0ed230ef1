"""Kernels without Numba's compiler: the same results, and every line of them runs."""

import subprocess
import sys

from conftest import HANGS, ROOT, environment


def test_kernels_as_plain_python_equal_their_references_and_are_covered() -> None:
    command = [sys.executable, str(ROOT / "tests" / "programs" / "jit_off.py")]
    more = {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, env=environment() | more, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", f"lines never run:\n{done.stdout}"
