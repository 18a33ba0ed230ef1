"""What the scripts of jobs/ say of a mistake, before they install anything."""

import subprocess
from pathlib import Path

import pytest
from conftest import HANGS, ROOT


@pytest.mark.parametrize(
    ("script", "said"), [("sweep.sh", "nothing: there is no such file"), ("experiments/run.sh", "no experiment nothing")]
)
def test_what_is_not_there_is_told_at_once(tmp_path: Path, script: str, said: str) -> None:
    command = ["bash", str(ROOT / "jobs" / script), "nothing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
