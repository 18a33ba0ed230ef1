"""The edge lab does what its fleet says, and leaves nothing behind, however it ends."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import HANGS, ROOT, environment, mpirun_command
from labs import Host, Laboratory, reason

pytestmark = [pytest.mark.alone, pytest.mark.skipif(reason is not None, reason=str(reason))]

LAB = str(ROOT / "jobs" / "lab" / "lab")
NAME = f"t{os.getpid()}"
FLEET = """
[[hosts]]
name = "edge"
count = 2
cpu = 0.3
link = 20
[[hosts]]
name = "odd"
cpu = 0.1
isa = "avx2"
memory = "1G"
"""


def left_behind() -> list[str]:
    """Everything there is of this test's labs."""
    found = [line for line in _out("ip", "netns").splitlines() if NAME in line]
    found += [line for line in _out("mount").splitlines() if f"accept-lab/{NAME}" in line]
    # os.walk: groups vanish while one looks, which a Path's glob cannot bear.
    groups = (f"{folder}/{group}" for folder, below, _ in os.walk("/sys/fs/cgroup") for group in below)
    found += [group for group in groups if f"/accept-lab-{NAME}" in group]
    found += [str(path) for path in Path("/run/accept-lab").glob(f"{NAME}*")]
    found += [line for line in _out("ps", "-eo", "pid,args").splitlines() if f"sleep 98.{os.getpid()}" in line]
    return found + [line for line in _out("ip", "-o", "link").splitlines() if " al" in line and line not in LINKS]


def _out(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


LINKS = _out("ip", "-o", "link").splitlines() if shutil.which("ip") else []


def lab(*words: object, code: int = 0, name: str = NAME) -> str:
    done = subprocess.run([LAB, "--name", name, *map(str, words)], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def fleet(tmp_path: Path):
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    yield path
    for name in (NAME, f"{NAME}-other"):
        subprocess.run([LAB, "--name", name, "down"], capture_output=True, timeout=60)
    assert left_behind() == []


def heed_interrupts() -> None:
    """Also where the tests run in the background of a shell, which has its jobs ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def until(what, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_hosts_are_what_the_fleet_says(fleet: Path) -> None:
    shown = lab("up", fleet)
    assert "edge1" in shown
    assert "20 Mbit/s" in shown
    assert "avx2" in shown
    assert "1.0 G" in shown
    script = "hostname; echo $ATEN_CPU_CAPABILITY $ONEDNN_MAX_CPU_ISA $OMP_NUM_THREADS; ip -o addr show eth0"
    odd = lab("exec", "odd", "--", "sh", "-c", script)
    assert odd.splitlines()[:2] == ["odd", "avx2 AVX2 1"]
    assert lab("exec", "edge1", "--", "sh", "-c", "hostname; echo x$ATEN_CPU_CAPABILITY").split() == ["edge1", "x"]
    assert "is up already" in lab("up", fleet, code=2)
    assert "no host" in lab("exec", "edge9", "--", "true", code=2)
    lab("down")
    assert "no lab" in lab("status", code=2)


def test_mpirun_starts_a_rank_on_each_host(fleet: Path) -> None:
    lab("up", fleet)
    program = "import os, socket; print('rank on', socket.gethostname(), os.environ.get('ONEDNN_MAX_CPU_ISA'))"
    hostfile = ["-hostfile", f"/run/accept-lab/{NAME}/edges"]
    for flags in (hostfile, []):
        out = lab("run", "--", *mpirun_command(3), *flags, sys.executable, "-c", program)
        # mpirun may warn between the ranks' lines (of an agent that was faster than its setpgid).
        told = sorted(line for line in out.splitlines() if line.startswith("rank on "))
        assert told == ["rank on edge1 None", "rank on edge2 None", "rank on odd AVX2"], out
    assert lab("run", "--", "sh", "-c", "exit 7", code=7) == ""


BURN = """
import time
began, used = time.monotonic(), time.process_time()
while time.monotonic() < began + 1.5: pass
print((time.process_time() - used) / (time.monotonic() - began))
"""


def test_share_of_a_core_and_its_change(fleet: Path) -> None:
    lab("up", fleet)
    assert 0.02 < float(lab("exec", "odd", "--", sys.executable, "-c", BURN)) < 0.13
    lab("set", "odd", "cpu=0.5")
    assert 0.2 < float(lab("exec", "odd", "--", sys.executable, "-c", BURN)) < 0.55
    assert "0.50" in next(line for line in lab("status").splitlines() if line.startswith("odd"))
    assert "expected 0.01 to 1" in lab("set", "odd", "cpu=3", code=2)


RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 5000)); print("ready", flush=True)
other, _ = server.accept(); total, began = 0, None
while data := other.recv(1 << 20):
    began = began or time.monotonic(); total += len(data)
print(8e-6 * total / (time.monotonic() - began))
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(bytes(int(sys.argv[2])))"


def mbit(address: str, size: int) -> float:
    """Rate from edge1 to edge2 as a socket sees it."""
    command = [LAB, "--name", NAME, "exec", "edge2", "--", sys.executable, "-c", RECEIVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        lab("exec", "edge1", "--", sys.executable, "-c", SEND, address, size)
        return float(receiver.stdout.readline())


def test_link_s_rate_and_its_change(fleet: Path) -> None:
    lab("up", fleet)
    address = next(line.split()[1] for line in lab("status").splitlines() if line.startswith("edge2"))
    assert 14 < mbit(address, 3_000_000) < 20.5
    lab("set", "edge1", "link=4")
    assert 2.8 < mbit(address, 800_000) < 4.3
    lab("set", "edge1", "link=free")
    lab("set", "edge2", "link=free")
    assert mbit(address, 20_000_000) > 100


def test_power_off_and_cut_cable(fleet: Path) -> None:
    lab("up", fleet)
    sleeper = subprocess.Popen([LAB, "--name", NAME, "exec", "edge1", "--", "sleep", f"98.{os.getpid()}"])
    until(lambda: "1 process" in lab("status"))
    address = next(line.split()[1] for line in lab("status").splitlines() if line.startswith("edge1"))
    ping = ("exec", "edge2", "--", sys.executable, "-c")
    probe = f"import socket; s = socket.socket(); s.settimeout(1); print(s.connect_ex(('{address}', 9)))"
    assert "111" in lab(*ping, probe)  # refused: the host is there
    lab("cut", "edge1")
    assert sleeper.poll() is None
    assert "cut off" in lab("status")
    assert "111" not in lab(*ping, probe)
    lab("mend", "edge1")
    until(lambda: "111" in lab(*ping, probe))
    lab("kill", "edge1")
    assert sleeper.wait(10) == -signal.SIGKILL
    assert "cut off" in lab("status")


def test_two_labs_do_not_collide(fleet: Path) -> None:
    lab("up", fleet)
    other = f"{NAME}-other"
    lab("up", fleet, name=other)
    nets = {Laboratory(name).network.cidr for name in (NAME, other)}
    assert len(nets) == 2
    sleeper = subprocess.Popen([LAB, "--name", other, "exec", "odd", "--", "sleep", f"98.{os.getpid()}"])
    until(lambda: "1 process" in lab("status", name=other))
    lab("down")
    assert sleeper.poll() is None
    assert lab("exec", "edge1", "--", "hostname", name=other) == "edge1\n"
    lab("down", name=other)
    assert sleeper.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_lab_ends_with_the_command_it_was_made_for(fleet: Path, number: int) -> None:
    """Also when ``lab`` itself is killed, whatever runs on the hosts."""
    inside = [LAB, "--name", NAME, "exec", "odd", "--", "sleep", f"98.{os.getpid()}"]
    command = [LAB, "--name", NAME, "run", "--fleet", str(fleet), "--", *inside]
    running = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts
    )
    until(lambda: (Path("/run/accept-lab") / NAME / "state.json").exists())
    until(lambda: any(Laboratory(NAME).processes("odd")))
    if number == signal.SIGINT:
        os.killpg(running.pid, number)  # as a terminal sends it
    else:
        os.kill(running.pid, number)
    running.wait(20)
    until(lambda: left_behind() == [])


@pytest.mark.parametrize("delay", [0.05, 0.15, 0.25, 0.4])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_lab_half_made_is_removed(fleet: Path, delay: float, number: int) -> None:
    making = subprocess.Popen(
        [LAB, "--name", NAME, "up", str(fleet)], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(delay)
    making.send_signal(number)
    if making.wait(20) == 0:
        lab("down")
    until(lambda: left_behind() == [] or _complete())


@pytest.mark.parametrize("where", ["Path.rename", "Network.make_bridge", "Groups.make"])
def test_a_lab_killed_while_it_claims_its_name(fleet: Path, where: str) -> None:
    dies = f"""
        import os, sys
        sys.path[:0] = {[str(Path(LAB).parent), *sys.path]!r}
        from edgelab import cli, laboratory
        laboratory.{where} = lambda *_: os.kill(os.getpid(), 9)
        sys.argv = ["lab", "--name", {NAME!r}, "up", {str(fleet)!r}]
        cli.main()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(dies)], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == -signal.SIGKILL, done.stderr
    until(lambda: left_behind() == [])


def _complete() -> bool:
    """Killed after it was done: the lab is up for good (the fixture takes it down)."""
    command = [LAB, "--name", NAME, "exec", "odd", "--", "hostname"]  # fails while the keeper removes the lab
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    return done.returncode == 0 and "odd" in done.stdout


def test_what_a_run_leaves_is_ended(fleet: Path) -> None:
    lab("up", fleet)
    inside = f"{LAB} --name {NAME} exec odd -- sleep 98.{os.getpid()} & sleep 1"
    lab("run", "--", "sh", "-c", inside)
    assert not Laboratory(NAME).processes("odd")


def test_a_command_that_takes_too_long(tmp_path: Path) -> None:
    with Laboratory(NAME).using([Host("edge", 1.0)]) as lab_:
        with pytest.raises(Exception, match="still running after 1 s"):
            lab_.run(["sh", "-c", f"echo before; sleep 98.{os.getpid()}"], 1, env=environment())
    assert left_behind() == []


def test_needs_root(fleet: Path) -> None:
    command = ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, LAB, "up", str(fleet)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 2
    assert done.stderr.startswith("lab: ")
    assert len(done.stderr.splitlines()) == 1
