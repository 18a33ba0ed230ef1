"""Output goes on where its reader is gone."""

import os
import subprocess
import sys

PROGRAM = """
import sys
from accept_mpi.cli.terminal import outlive_terminal
outlive_terminal()
print("seen", flush=True)
sys.stdin.read()
for stream in (sys.stdout, sys.stderr):
    print("x" * 100_000, file=stream, flush=True)
sys.exit(7)
"""


def test_nobody_reads() -> None:
    source, target = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=target, stderr=target)
    os.close(target)
    assert os.read(source, 100) == b"seen\n"
    os.close(source)
    process.communicate(timeout=60)
    assert process.returncode == 7
