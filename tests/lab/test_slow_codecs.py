"""MobileNetV2 over four hosts on a link of 20 Mbit/s: few bits are sent, and "auto" chooses few. How much they pay is
measured by ``jobs/experiments/run.sh low_bit``, in turns that a test has no time for."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import HANGS
from labs import lab_of, mpirun, reason

from accept_mpi.logs.format import KINDS
from accept_mpi.logs.reader import open_log

pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

MBIT, HOSTS, STEPS = 20, 4, 6
# Cut where little crosses: 0.25, 0.12 and 0.08 MB a micro-batch; on this link 105, 52 and 33 ms uncoded.
JOB = """
[model]
name = "mobilenetv2"
args = {{ classes = 10 }}
[data]
name = "digits"
args = {{ size = 32 }}
[train]
batch_size = 64
micro_batches = 8
steps = {steps}
evaluate_every = 0
[pipeline]
cuts = [12, 27, 42]
forward = "{codec}"
backward = "{codec}"
[output]
directory = "{name}"
"""


def test_few_bits_are_chosen_at_20_mbit(tmp_path: Path) -> None:
    sent = {}
    with lab_of(HOSTS, MBIT) as lab:
        for codec in ("none", "uniform:4", "auto"):
            name = codec.replace(":", "")
            (tmp_path / f"{name}.toml").write_text(JOB.format(steps=STEPS, codec=codec, name=name))
            out = mpirun(lab, tmp_path, "-m", "accept_mpi", "train", f"{name}.toml", deadline=HANGS)
            with open_log(tmp_path / name / "log.h5") as log:
                rows = log["trace"][:]
                sent[codec] = int(rows["bytes_wire"][rows["kind"] == KINDS.index("encode")].sum())
    assert "uniform:" in out or "bf16" in out  # the table of what was chosen
    # How much faster that is depends on the machine; bytes do not.
    assert sent["none"] >= 6 * sent["uniform:4"], sent
    assert sent["none"] >= 1.9 * sent["auto"], sent
