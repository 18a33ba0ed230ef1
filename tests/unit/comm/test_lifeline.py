"""The lifeline's connections."""

import socket
import threading
import time

import pytest

from accept_mpi.comm import lifeline
from accept_mpi.comm.lifeline import Lifeline

TOKEN = "0" * 32


def nothing(rank: int, error: str | None, exit_code: int) -> None:
    pass


def test_rank_0_may_take_a_while_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells all ranks its address, one after the other, before it looks who has come. A rank that had gone by then was
    taken for lost: its connection was there, and closed."""
    monkeypatch.setattr(lifeline, "_CONNECT_SECONDS", 0.1)
    centre, rank = Lifeline(0, 2, nothing), Lifeline(1, 2, nothing)
    listener = centre._listen()
    found: list[set[int]] = []

    def answer() -> None:
        time.sleep(0.5)
        found.append(centre._accept(listener, TOKEN))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        rank._connect(["127.0.0.1"], listener.getsockname()[1], TOKEN)
        thread.join()
        assert found == [{1}]
        assert rank.report("why", 1)
        assert b"why" in centre._peers[1].recv(1 << 10, socket.MSG_PEEK)
    finally:
        for one in (listener, *centre._peers.values(), *rank._peers.values()):
            one.close()


def test_a_host_may_have_a_name_that_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python refuses a part of more than 63 characters, or without any, before it asks: every rank ended with a
    traceback."""
    for name in ("x" * 64, ".pi", "no-such-host.invalid"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert lifeline._addresses()[0] == "127.0.0.1"
