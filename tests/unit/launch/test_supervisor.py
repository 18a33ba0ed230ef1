"""The supervisor, with a make-believe mpirun and launch agent."""

import re
from pathlib import Path

import pytest
import samples

from accept_mpi.errors import TooFewDevices, UserError
from accept_mpi.launch import host_file, supervisor
from accept_mpi.launch.host_file import answering, read_hosts
from accept_mpi.launch.supervisor import Request, Supervisor


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/bash", *lines]) + "\n")
    path.chmod(0o755)
    return path


VERSION = 'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.11"; exit; fi'


def asked_for_a_checkpoint(mpirun: Path, tmp_path: Path, *lines: str) -> None:
    """An mpirun that notes how it was called, and has ``asked`` set once it is asked for a checkpoint."""
    script(mpirun, VERSION, f'echo "$*" >> {tmp_path}/calls', "trap 'asked=1' USR1", *lines)


@pytest.fixture
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An mpirun that notes how it was called and ends with the next of the exit codes in ``codes``."""
    found = script(
        tmp_path / "mpirun",
        VERSION,
        f'echo "$*" >> {tmp_path}/calls',
        f"code=$(head -1 {tmp_path}/codes); sed -i 1d {tmp_path}/codes",
        f'[ -e {tmp_path}/steps ] && echo "step 3/5  epoch 0"',
        f'[ "$code" = 0 -a -e {tmp_path}/done ] && echo "step 5  done: no evaluation"',
        "exit ${code:-1}",
    )
    monkeypatch.setattr("accept_mpi.launch.mpirun.path", lambda: str(found))
    monkeypatch.setattr(supervisor, "_POLL", 0.01)
    (tmp_path / "done").touch()
    monkeypatch.chdir(tmp_path)
    return found


def supervised(tmp_path: Path, codes: list[int], **request: object) -> tuple[int, list[str]]:
    """Exit code of the supervisor, and how it called mpirun."""
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    job = samples.write_job(tmp_path / "job.toml", samples.CNN)
    code = Supervisor(Request(job, **({"ranks": 3} | request))).run()  # type: ignore[arg-type]
    return code, (tmp_path / "calls").read_text().splitlines()


def test_it_begins_again_until_the_job_is_done(tmp_path: Path, mpirun: Path) -> None:
    code, calls = supervised(tmp_path, [1, 137, 0], overrides=("train.steps=3",))
    assert code == 0
    assert len(calls) == 3
    assert all("--with-ft ulfm" in call and "-n 3 " in call and "--set train.steps=3" in call for call in calls)


def test_one_rank_a_line_on_its_own_host(tmp_path: Path, mpirun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that names no place, as ":oversubscribe" does, fills the first host, from the environment, too."""
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", "true")
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    mpirun.write_text(mpirun.read_text().replace("code=$(", f"env > {tmp_path}/env; cat $6 > {tmp_path}/hosts; code=$(", 1))
    mpirun.write_text(mpirun.read_text().replace("cat $6", 'while [ "$1" != -hostfile ]; do shift; done; cat $2'))
    (tmp_path / "edges").write_text("pi.kitchen.lan\npi.attic.lan slots=2\n")
    code, calls = supervised(tmp_path, [0], hostfile=tmp_path / "edges", ranks=None)
    assert code == 0
    assert "--map-by slot:oversubscribe --bind-to none" in calls[0]
    assert "-n 3 " in calls[0]
    assert re.search(r"--run \S+/1/1,2\b", calls[0])
    assert (tmp_path / "hosts").read_text() == "pi.kitchen.lan slots=1\npi.attic.lan slots=2\n"
    told = (tmp_path / "env").read_text()
    assert "PRTE_MCA_prte_keep_fqdn_hostnames=1\n" in told
    assert "PRTE_MCA_prte_hetero_nodes=1\n" in told  # else mpirun crashes on some hosts: tests/lab/test_several_machines.py


def test_a_host_without_the_checkout(tmp_path: Path, mpirun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = script(tmp_path / "agent", 'exit "$7"')  # HOST test -x PYTHON || exit CODE
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(agent))
    (tmp_path / "edges").write_text("pi1\n")
    with pytest.raises(UserError, match=r"pi1 answers, but it has no .*same path on all hosts"):
        supervised(tmp_path, [0], hostfile=tmp_path / "edges", ranks=None)


def test_a_stop_while_hosts_are_asked(
    tmp_path: Path, mpirun: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends ssh, too: that was told as hosts that do not answer, a mistake in the host file."""
    agent = script(tmp_path / "agent", "kill -INT $PPID", "exit 255")
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(agent))
    (tmp_path / "edges").write_text("pi1\nlocalhost\n")
    (tmp_path / "calls").touch()
    assert supervised(tmp_path, [0], hostfile=tmp_path / "edges", ranks=None) == (1, [])
    assert capfd.readouterr().err == ""


def test_temporary_files_that_cannot_be_written(tmp_path: Path, mpirun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun would not begin, again and again."""
    monkeypatch.setenv("TMPDIR", str(mpirun))
    with pytest.raises(UserError, match=rf"^TMPDIR = {mpirun}: mpirun needs to write there, which does not work: "):
        supervised(tmp_path, [0])
    monkeypatch.setenv("TMPDIR", str(tmp_path / "new"))
    assert supervised(tmp_path, [0])[0] == 0


def test_nothing_with_a_name_lies_among_temporary_files(
    tmp_path: Path, mpirun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that is killed could not remove it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    mpirun.write_text(mpirun.read_text().replace("code=$(", f'ls -A "$TMPDIR" >> {tmp_path}/left; code=$(', 1))
    (tmp_path / "edges").write_text("localhost slots=2\n")
    for how in ({"ranks": 2}, {"hostfile": tmp_path / "edges", "ranks": None}):
        assert supervised(tmp_path, [1, 0], **how)[0] == 0
    assert (tmp_path / "left").read_text() == ""


def test_it_gives_up_where_no_start_makes_a_step(tmp_path: Path, mpirun: Path) -> None:
    code, calls = supervised(tmp_path, [])
    assert (code, len(calls)) == (1, 3)


@pytest.mark.parametrize("ended", [255, 137, 143, 3])
def test_a_run_that_is_given_up_has_a_code_of_the_reference(tmp_path: Path, mpirun: Path, ended: int) -> None:
    """Not that of mpirun's daemon or of a signal; 3 would say that a checkpoint is there."""
    assert supervised(tmp_path, [ended], restarts=0)[0] == 1


def test_a_mistake_is_not_tried_again(tmp_path: Path, mpirun: Path) -> None:
    code, calls = supervised(tmp_path, [2, 0])
    assert (code, len(calls)) == (2, 1)


def test_too_few_processes_are_not_too_few_hosts(tmp_path: Path, mpirun: Path) -> None:
    """Processes were killed (out of memory), their hosts answer."""
    code, calls = supervised(tmp_path, [TooFewDevices.exit_code, 0])
    assert (code, len(calls)) == (0, 2)


def test_an_exit_code_of_0_is_not_enough(tmp_path: Path, mpirun: Path) -> None:
    """mpirun gives it where it lost a host's daemon, too."""
    (tmp_path / "done").unlink()
    code, calls = supervised(tmp_path, [0, 0], restarts=1)
    assert (code, len(calls)) == (1, 2)


def test_what_rank_0_prints_tells_how_far_it_is(
    tmp_path: Path, mpirun: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Its log may lie on another host."""
    (tmp_path / "steps").touch()
    code, calls = supervised(tmp_path, [1, 1, 1, 1, 0])
    assert (code, len(calls)) == (0, 5)  # more starts than three without a step
    starts = [re.search(r"--run (\S+)/(\d+)", call) for call in calls]
    assert [int(start[2]) for start in starts] == [1, 2, 3, 4, 5]
    assert len({start[1] for start in starts}) == 1
    assert capfdbinary.readouterr().out.count(b"step 3/5  epoch 0\n") == 5


def test_what_ranks_print_without_an_end_of_line(tmp_path: Path, mpirun: Path) -> None:
    """Dots for each sample or a bar stand before what tells of steps, of the end, and of a signal's checkpoint: the run
    would count as one that stands still, and as not done."""
    (tmp_path / "steps").touch()
    mpirun.write_text(mpirun.read_text().replace('echo "step', 'printf "..\\r50 %%|" && echo "step'))
    code, calls = supervised(tmp_path, [1, 1, 1, 1, 0])
    assert (code, len(calls)) == (0, 5)
    script(
        mpirun,
        VERSION,
        "trap 'asked=1' USR1",
        "kill -TERM $PPID",
        'until [ "$asked" ]; do sleep 0.05; done',
        "printf '\\r50 %%|' >&2",
        "echo 'accept_mpi: rank 0 on host pi: stopped by a signal after step 9; go on with --resume run' >&2",
        "exit 3",
    )
    assert supervised(tmp_path, [])[0] == 3


def test_a_path_that_a_shell_complains_of_is_no_last_word(
    tmp_path: Path, mpirun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was ended a minute after its start, again and again."""
    monkeypatch.setattr(supervisor, "_DONE_SECONDS", 0.1)
    script(
        mpirun,
        VERSION,
        f'echo "$*" >> {tmp_path}/calls',
        "echo 'bash: line 1: cd: /home/pi/accept_mpi: No such file or directory' >&2",
        'sleep 0.5; echo "step 5  done: no evaluation"',
    )
    code, calls = supervised(tmp_path, [], restarts=0)
    assert (code, len(calls)) == (0, 1)


def test_a_bug_that_comes_again_and_again(tmp_path: Path, mpirun: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Twenty starts showed the same traceback."""
    (tmp_path / "steps").touch()
    code, calls = supervised(tmp_path, [1] * 9)
    assert (code, len(calls)) == (1, 6)
    said = "given up after 6 starts, the last 5 of them not beyond the step that was reported before; "
    assert f"{said}the highest step reported is 3\n" in capfd.readouterr().err


def test_restarts_have_a_limit(tmp_path: Path, mpirun: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, calls = supervised(tmp_path, [1, 1, 0], restarts=1)
    assert (code, len(calls)) == (1, 2)
    assert "given up after 2 starts, without a step\n" in capfd.readouterr().err
    (tmp_path / "steps").touch()
    mpirun.write_text(mpirun.read_text().replace("step 3/5  epoch 0", "step 3  test loss 1.1"))
    supervised(tmp_path, [1, 1, 0], restarts=0)
    assert "given up after 1 start; the highest step reported is 3\n" in capfd.readouterr().err


def test_hosts_that_do_not_answer_are_left_out(tmp_path: Path, mpirun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = script(tmp_path / "agent", 'case "$1" in dead) exit 255 ;; silent) exec sleep 60 ;; *) shift; eval "$*" ;; esac')
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(agent))
    monkeypatch.setattr(host_file, "ASK_SECONDS", 2.0)
    hosts = tmp_path / "edges"
    hosts.write_text("one slots=2  # the fast one\ndead\nsilent slots=1\ntwo\n\n")
    found = read_hosts(hosts)
    assert [(host.name, host.slots) for host in found] == [("one", 2), ("dead", 1), ("silent", 1), ("two", 1)]
    assert [host.line for host in found] == ["one slots=2", "dead slots=1", "silent slots=1", "two slots=1"]
    assert [host.name for host in answering(found)] == ["one", "two"]
    code, calls = supervised(tmp_path, [0], hostfile=hosts, ranks=None)
    assert code == 0
    assert "-n 3 " in calls[0]


def test_a_while_without_any_host(tmp_path: Path, mpirun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own cable was out for a moment."""
    agent = script(tmp_path / "agent", f"[ ! -e {tmp_path}/out ] || {{ rm -f {tmp_path}/out; exit 255; }}")
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(agent))
    hosts = tmp_path / "edges"
    hosts.write_text("one\n")
    mpirun.write_text(mpirun.read_text().replace("sed -i", f"[ $code = 1 ] && touch {tmp_path}/out; sed -i"))
    code, calls = supervised(tmp_path, [1, 0], hostfile=hosts, ranks=None)
    assert (code, len(calls)) == (0, 2)
    agent.write_text(agent.read_text().replace("rm -f", "true"))
    with pytest.raises(UserError, match="none of the hosts answers"):
        supervised(tmp_path, [1, 0], hostfile=hosts, ranks=None, stall=0.5)


def test_one_look_without_any_answer_does_not_end_a_job(
    tmp_path: Path, mpirun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = script(tmp_path / "agent", f"echo x >> {tmp_path}/asked", f"[ $(wc -l < {tmp_path}/asked) != 2 ] || exit 255")
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(agent))
    monkeypatch.setattr(supervisor, "_ASK_EVERY", 0.2)
    mpirun.write_text(mpirun.read_text().replace("code=$(", "sleep 1; code=$("))
    hosts = tmp_path / "edges"
    hosts.write_text("one\n")
    code, calls = supervised(tmp_path, [0], hostfile=hosts, ranks=None)
    assert (code, len(calls)) == (0, 1)


def test_mistakes_are_one_sentence(tmp_path: Path, mpirun: Path) -> None:
    job = samples.write_job(tmp_path / "job.toml", samples.CNN)
    with pytest.raises(UserError, match="cannot read the host file"):
        Supervisor(Request(job, hostfile=tmp_path / "none"))
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(UserError, match="no hosts"):
        Supervisor(Request(job, hostfile=tmp_path / "empty"))
    with pytest.raises(UserError, match="cannot read the job file"):
        Supervisor(Request(tmp_path / "none.toml", ranks=1))


@pytest.mark.parametrize("patience", [1, 2])
def test_a_stop_waits_for_its_checkpoint_as_long_as_the_run_goes_on(
    tmp_path: Path, mpirun: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], patience: int
) -> None:
    """Over slow links it takes a minute, and there may be no other. A second signal ends the run at once."""
    monkeypatch.setattr(supervisor, "_CHECKPOINT_SECONDS", 0.1)
    asked_for_a_checkpoint(
        mpirun,
        tmp_path,
        "echo step 3/50  epoch 0",
        "kill -TERM $PPID",
        'until [ "$asked" ]; do sleep 0.05; done',
        "for step in 4 5 6 7 8 9; do sleep 0.1; echo step $step/50  epoch 0; done",
        f"[ {patience} = 2 ] && kill -TERM $PPID && for n in $(seq 500); do sleep 0.1; done",
        "echo 'accept_mpi: rank 0 on host pi: stopped by a signal after step 9; go on with --resume run' >&2",
        "exit 3",
    )
    code, calls = supervised(tmp_path, [])
    assert code == (3 if patience == 1 else 1)
    assert len(calls) == 1
    assert "another signal ends the run without it" in capfd.readouterr().err


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stop_in_the_last_step_is_of_a_job_that_is_done(tmp_path: Path, mpirun: Path, signals: int) -> None:
    """There is no step left that a checkpoint could end; the run comes to its own end. It was called failed."""
    asked_for_a_checkpoint(
        mpirun,
        tmp_path,
        "echo step 4/5  epoch 0",
        "kill -TERM $PPID",
        'until [ "$asked" ]; do sleep 0.05; done',
        'echo "step 5  done: no evaluation"',
        f"[ {signals} = 2 ] && sleep 0.2 && kill -TERM $PPID && sleep 5",
        "exit 0",
    )
    code, calls = supervised(tmp_path, [])
    assert code == 0
    assert len(calls) == 1


def test_a_job_that_is_done_while_it_is_to_begin_again(
    tmp_path: Path, mpirun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host answers again in its last step: it is not made anew, for which there may be no checkpoint."""
    agent = script(tmp_path / "agent", f"[ $1 != pi2 -o -e {tmp_path}/calls ] || exit 255")
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(agent))
    monkeypatch.setattr(supervisor, "_ASK_EVERY", 0.0)
    asked_for_a_checkpoint(
        mpirun,
        tmp_path,
        "echo step 4/5  epoch 0",
        'until [ "$asked" ]; do sleep 0.05; done',
        'echo "step 5  done: no evaluation"',
    )
    (tmp_path / "edges").write_text("pi1\npi2\n")
    code, calls = supervised(tmp_path, [], hostfile=tmp_path / "edges", ranks=None, restarts=0)
    assert code == 0
    assert len(calls) == 1
