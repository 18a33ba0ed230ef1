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
