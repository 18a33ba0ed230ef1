"""Memory that a process may have: what its control groups allow, of either version, is less than the machine's."""

import json
import math
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANGS, environment

from accept_mpi.device import memory
from accept_mpi.device.cgroups import cpu_share, of_group, quota


@pytest.mark.parametrize("version", [1, 2])
def test_the_narrowest_group_counts(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controllers, top = ("cpu,memory", tmp_path / "memory") if version == 1 else ("", tmp_path)
    limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    inner = top / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, allowed in ((inner, "max"), (inner.parent, "3000000")):
        (folder / limit).write_text(allowed)
        (folder / used).write_text("1000000")
    groups = of_group(controllers, "/outer/inner", tmp_path, "memory", (limit, used), (limit, used))
    assert memory.limits(groups) == [(3e6, 1e6)]
    assert of_group("cpu", "/outer/inner", tmp_path, "memory", (limit, used), ()) == []
    machine = memory.total_memory()
    monkeypatch.setattr(memory, "_limits", lambda: [(3e6, 1e6)])
    assert memory.total_memory() == 3_000_000 < machine
    assert memory.available_memory() == 2e6


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_the_kernel_keeps_are_no_memory_in_use(version: int) -> None:
    """A group that had read its data set and written a checkpoint had no memory left, and no plan fitted."""
    stat = "cache 900000\ninactive_file 7000\nactive_file 60000\n"
    more = "total_inactive_file 700000\n" if version == 1 else ""
    assert memory.limits([["3000000\n", "1000000\n", stat + more]]) == [(3e6, 3e5 if version == 1 else 993e3)]
    assert memory.limits([["max\n", "1000000\n", stat]]) == []


def test_a_quota_of_cpu() -> None:
    assert quota(["40000\n", "100000\n"]) == quota(["40000 100000\n"]) == 0.4
    assert quota(["-1\n", "100000\n"]) == quota(["max 100000\n"]) == math.inf
    assert cpu_share() > 0


_KEPT = """
import ctypes, json, os
from pathlib import Path
from accept_mpi.device.allocator import give_back_memory, keep_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
ctypes.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def mib():  # of its own: the kernel takes pages of files back whenever it likes
    resident, of_files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE") >> 20

assert keep_memory()
before = mib()
pieces = [libc.malloc(16 << 20) for _ in range(81)]  # the first of them may lie in what was free and resident before
for piece in pieces:
    ctypes.memset(piece, 1, 16 << 20)
found = [mib() - before]
for piece in pieces:
    libc.free(piece)
found.append(mib() - before)
give_back_memory()
print(json.dumps([*found, mib() - before]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    """More than 1 GiB that was free at a time went back, and was taken from the kernel again in the next step."""
    done = subprocess.run([sys.executable, "-c", _KEPT], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    taken, kept, after = json.loads(done.stdout)
    assert taken >= 1280
    assert kept >= 1280
    assert after <= 256


_TAKEN = """
import resource, torch
from accept_mpi.device.allocator import keep_memory, take_memory

def faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_memory()
torch.ones(8)
first = faults(lambda: take_memory(200 << 20))
print(first, faults(lambda: [torch.ones(1 << 20) for _ in range(40)]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_memory_taken_in_advance_is_found_by_what_is_allocated_next() -> None:
    """160 MB of tensors after 200 MiB were taken: none of it comes from the kernel."""
    done = subprocess.run([sys.executable, "-c", _TAKEN], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    first, later = map(int, done.stdout.split())
    assert later < 0.1 * first


_PROBED = """
from accept_mpi.job_file import parse
from accept_mpi.device.allocator import keep_memory, memory_taken
keep_memory()
import torch
from accept_mpi.device import compute
from accept_mpi.profiling import layer_timer, timed_piece
from accept_mpi.models.losses import find_loss
from accept_mpi.models import load
from accept_mpi.profiling.outline import outline_of
from accept_mpi.profiling.layer_timer import Subject, time_layers
from accept_mpi.profiling.timed_piece import TimedPiece
from clocks import Clock

torch.set_num_threads(1)
job = parse('[model]\\nname="m"\\n[data]\\nname="d"\\n[train]\\nsteps=1\\n[output]\\ndirectory="r"', "job")
chain = load("mobilenetv2", {"classes": 10}, 0)
inputs, targets = (torch.randn(8, 3, 32, 32),), torch.zeros(8, dtype=torch.int64)
taken, measure = [], TimedPiece.measure

def counted(*args):
    before = memory_taken()
    found = measure(*args)
    taken.append(memory_taken() - before)
    return found

TimedPiece.measure = counted
layer_timer.time = timed_piece.time = compute.time = Clock(tick=1e-3)  # some eight rounds of each
time_layers(Subject(chain, outline_of(chain, job, inputs), job, find_loss("cross_entropy"), inputs, targets), 60.0)
print(len(taken), max(taken))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_pieces_of_a_model_are_measured_in_memory_that_is_there() -> None:
    """Three layers of MobileNetV2 took 100 MiB from the kernel in their first six rounds, and twice their time."""
    command = [sys.executable, "-c", _PROBED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, env=environment())
    assert done.returncode == 0, done.stderr
    pieces, most = map(int, done.stdout.split())
    assert pieces == 10
    assert most * resource.getpagesize() < 16 << 20


_GROWTH = """
import json, re, sys
from accept_mpi.job_file import parse
from accept_mpi.device.allocator import keep_memory
keep_memory()
import torch
from accept_mpi.models import load
from accept_mpi.models.layers import build_layers
from accept_mpi.planning.memory import memory_of
from accept_mpi.profiling.outline import outline_of
from accept_mpi.plan import make_plan
from accept_mpi.planning.memory import MemoryModel
from accept_mpi.pipeline.stage import Stage
from accept_mpi.profiling.cluster_profile import ClusterProfile

torch.set_num_threads(1)
start, stop, behind = map(int, sys.argv[1:])
job = parse(sys.stdin.read(), "job")
chain = load(job.model.name, job.model.args, 0)
model = outline_of(chain, job, (torch.randn(16, 3, 32, 32),))
cluster = ClusterProfile(model, [], [], [])
plan = make_plan(len(chain), [start, stop] if start else [stop], slack=job.pipeline.slack)
depth = int(MemoryModel(cluster, job, behind + 1, plan.slack).in_flight[behind])
forecast = memory_of(cluster, job, plan)[-1 - behind]

def like(shapes):
    return tuple(torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in shapes)

def taken():  # at most so far (ru_maxrss would begin with what the test's own process took)
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])

before = taken()
stage = Stage(build_layers(chain, start, stop, 0), job, None, True)
flying = {}
for k in range(depth + 6):
    flying[k] = stage.forward(0, k, like(spec.shape for spec in model.layers[start].inputs)).outputs
    if k >= depth - 1:
        stage.backward(0, k - depth + 1, like(out.shape for out in flying.pop(k - depth + 1)))
print(json.dumps([forecast, taken() - before]))
"""
_JOB = """
[model]
name = "mobilenetv2"
args = { classes = 10 }
[data]
name = "digits"
[train]
batch_size = 64
micro_batches = 4
steps = 1
optimizer = { name = "sgd", lr = 0.05, momentum = 0.9 }
[pipeline]
schedule = "1f1b-async"
[output]
directory = "r"
"""


@pytest.mark.parametrize("stage", [(0, 21, 1), (2, 8, 1), (21, 40, 1)], ids=str)
def test_a_stage_takes_no_more_than_it_was_planned_to(stage: tuple[int, int, int]) -> None:
    """Resident memory, with all micro-batches in flight: what a device must have for a plan that gives it this stage."""
    command = [sys.executable, "-c", _GROWTH, *map(str, stage)]
    done = subprocess.run(command, input=_JOB, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    forecast, grown = json.loads(done.stdout)
    assert 0.5 * forecast < grown
    assert memory.planned(grown) <= forecast, f"{grown / 2**20:.0f} MiB for {forecast / 2**20:.0f}"
