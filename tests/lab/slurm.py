"""A real Slurm of one node, on ports and in a directory of its own: started and stopped by tests, or by hand:

python tests/lab/slurm.py -- sbatch --wait jobs/slurm/train.sbatch jobs/quickstart.toml
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

_CONF = """
ClusterName=accept-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
InactiveLimit=0
KillWait=5
MinJobAge=300
# More slots than cores: the tests' ranks are light.
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_CPUS = 8
_START_SECONDS = 30.0


def why_not() -> str | None:
    """Why no Slurm can be started here, or None."""
    if os.geteuid() != 0:
        return "needs root to start Slurm's daemons"
    for tool in ("slurmctld", "slurmd", "munged", "sbatch"):
        if shutil.which(tool, path=_path()) is None:
            return f"needs {tool} (Debian: slurm-wlm and munge)"
    return None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Slurm:
    """``with Slurm() as slurm: slurm.run(["sbatch", ...])``; nothing is left after it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="accept-slurm-"))
        self.folder.chmod(0o755)  # munged insists
        self.environment = os.environ | {"PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Slurm":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._stop()

    def run(self, command: list[str], seconds: float, **options: object) -> str:
        """Run a command of this Slurm's; its output. Raises CalledProcessError, TimeoutExpired."""
        done = subprocess.run(
            command, env=self.environment, check=True, capture_output=True, text=True, timeout=seconds, **options
        )  # type: ignore[call-overload]
        return str(done.stdout)

    def wait(self, number: str, seconds: float) -> tuple[str, int]:
        """A job's last state and exit code, as soon as it has ended: "sbatch --wait" looks after 2, 10 and 42 s."""
        deadline = time.monotonic() + seconds
        state = "unknown"
        while time.monotonic() < deadline:
            try:
                shown = self.run(["scontrol", "show", "job", number, "--oneliner"], 20)
            except subprocess.CalledProcessError as error:  # its daemons may drop one question (a SIGPIPE, under load)
                state = f"not known ({error})"
            else:
                fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
                state = fields["JobState"]
                if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                    return state, int(fields["ExitCode"].partition(":")[0])
            time.sleep(0.3)
        raise TimeoutError(f"after {seconds:.0f} s the state of Slurm's job {number} is still {state}")

    def _start(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(1024))
        controller_port, node_port = _free_ports(2)
        conf = self.folder / "slurm.conf"
        places = {"host": socket.gethostname().split(".")[0], "folder": self.folder, "cpus": _CPUS}
        conf.write_text(_CONF.format(**places, controller_port=controller_port, node_port=node_port))
        files = {"key-file": key, "socket": self.folder / "munge.socket"}
        files |= {f"{what}-file": self.folder / f"munged.{what}" for what in ("pid", "log", "seed")}
        self._daemon("munged", "--foreground", "--force", *(f"--{key}={value}" for key, value in files.items()))
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged's socket")
        self._daemon("slurmctld", "-D", "-i", "-f", conf)
        self._daemon("slurmd", "-D", "-f", conf)
        self._until(lambda: "idle" in self.run(["sinfo", "-h", "-o", "%T"], 10), "the node to be idle")

    def _daemon(self, *command: object) -> None:
        with open(self.folder / f"{command[0]}.out", "wb") as out:
            words = [str(word) for word in command]
            self._daemons.append(
                subprocess.Popen(words, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )

    def _until(self, what: object, awaited: str) -> None:
        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                if what():  # type: ignore[operator]
                    return
            except subprocess.CalledProcessError:
                pass
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > until:
                logs = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in self.folder.glob("*.[lo]*"))
                raise RuntimeError(f"waited for {awaited}; ended: {ended}\n{logs}")
            time.sleep(0.1)

    def _stop(self) -> None:
        if len(self._daemons) == 3:
            subprocess.run(["scancel", "--full", "--user=root"], env=self.environment, capture_output=True, timeout=20)
            time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        # Job steps have daemons of their own (slurmstepd), which a hurried end can leave.
        subprocess.run(["pkill", "-9", "-f", f"slurmstepd.*{self.folder}"], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


if __name__ == "__main__":
    reason = why_not()
    if reason or len(sys.argv) < 2:
        sys.exit(reason or __doc__)
    with Slurm() as slurm:
        words = sys.argv[2:] if sys.argv[1] == "--" else sys.argv[1:]
        code = subprocess.run(words, env=slurm.environment).returncode
    sys.exit(code)
