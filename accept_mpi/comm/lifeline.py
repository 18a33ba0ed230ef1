"""The lifeline, which detects lost ranks: a TCP connection from every rank to rank 0, independent of MPI.

When a process dies, the kernel closes its sockets, so rank 0 knows within milliseconds which rank it was and in which step,
while MPI would only wait (and mpirun would end everyone half a second later). It also carries the one error message that
matters when a rank raises. Messages are JSON lines. If no connection can be made (a firewall), the run goes on without it:
errors then end the job through MPI_Abort, and mpirun names the rank.
"""

import contextlib
import json
import logging
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from accept_mpi.comm.messenger import Messenger
from accept_mpi.device.networks import addresses

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 2.0
_HELLO_SECONDS = 10.0
# A machine that lost its power or its cable goes silent without closing its sockets: after about 20 s it counts as lost.
_SILENCE = {"TCP_KEEPIDLE": 8, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


class Lifeline:
    """One rank's part of the star of connections whose centre is rank 0."""

    def __init__(self, rank: int, size: int, on_end: Callable[[int, str | None, int], None]) -> None:
        """``on_end(rank, error, exit_code)`` is called at most once, on the thread of the lifeline: on rank 0 when ``rank``
        ended, with the text of its error, or None if it died without one; elsewhere when rank 0 ended the job or died
        (``rank`` 0)."""
        self.rank, self.size = rank, size
        self.steps: dict[int, int] = {}
        """The step that each rank began last: this rank's own; on rank 0 also all others'; on rank 1 also rank 0's."""
        self._on_end = on_end
        self._ended = threading.Event()
        self._peers: dict[int, socket.socket] = {}
        self._closing = False

    @staticmethod
    def start(messenger: Messenger, deadline: float, on_end: Callable[[int, str | None, int], None]) -> "Lifeline":
        """Connect; all ranks call this together. ``deadline``: seconds to wait for the address of rank 0."""
        lifeline = Lifeline(messenger.rank, messenger.size, on_end)
        lifeline._join(messenger, deadline)
        return lifeline

    def _join(self, messenger: Messenger, deadline: float) -> None:
        listener = self._listen() if self.rank == 0 and self.size > 1 else None
        token = secrets.token_hex(16)
        where = (token, _addresses(), listener.getsockname()[1]) if listener else None
        token, addresses, port = messenger.broadcast(where, deadline, "the address of rank 0") or ("", [], 0)
        if listener:
            missing = set(range(1, self.size)) - self._accept(listener, token)
            listener.close()
            if missing:
                log.warning("no connection from rank %s: an unexpected end there will not be named", sorted(missing))
        elif self.rank:
            self._connect(addresses, port, token)
        if self._peers:
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def begin_step(self, step: int) -> None:
        """Report to rank 0 that this rank begins ``step``. Rank 0 reports to rank 1, which names the step if rank 0 dies."""
        self.steps[self.rank] = step
        self._tell(0 if self.rank else 1, step=step)

    def report(self, error: str, exit_code: int) -> bool:
        """Send rank 0 the reason for which this rank ends; returns True if that was possible. Not for rank 0."""
        return self._tell(0, error=error, exit_code=exit_code)

    def mute(self) -> None:
        """Do not call ``on_end`` any more, because this rank has its own reason to end."""
        self._ended.set()

    def end_all(self, exit_code: int) -> None:
        """Have all other ranks end with ``exit_code``. Only for rank 0."""
        self.mute()
        for rank in list(self._peers):
            self._tell(rank, end=exit_code)

    def close(self) -> None:
        """Announce a regular end, so that the closing of a connection no longer counts as a loss."""
        self._closing = True
        for rank in list(self._peers):
            self._tell(rank, bye=True)

    def leave(self) -> None:
        """Close all connections without notice; after a loss the surviving ranks create another lifeline."""
        self.mute()
        self._closing = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        listener = socket.create_server(("", 0), backlog=self.size)
        listener.settimeout(_HELLO_SECONDS)
        return listener

    def _accept(self, listener: socket.socket, token: str) -> set[int]:
        with contextlib.suppress(TimeoutError):
            while len(self._peers) < self.size - 1:
                peer, _ = listener.accept()
                peer.settimeout(_HELLO_SECONDS)
                with contextlib.suppress(OSError):
                    said = _receive_exactly(peer, len(token) + 4)
                    if secrets.compare_digest(said[:-4], token.encode()):
                        peer.sendall(b"ok")
                        self._adopt(struct.unpack("<i", said[-4:])[0], peer)
                        continue
                peer.close()
        return set(self._peers)

    def _connect(self, addresses: list[str], port: int, token: str) -> None:
        for address in addresses:
            try:
                peer = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
                peer.settimeout(_HELLO_SECONDS)  # rank 0 answers once it has told all ranks its address
                peer.sendall(token.encode() + struct.pack("<i", self.rank))
                if peer.recv(2) == b"ok":
                    self._adopt(0, peer)
                    return
                peer.close()
            except OSError:
                continue
        log.warning("rank %d cannot connect to rank 0 on any of %s", self.rank, ", ".join(addresses))

    def _adopt(self, rank: int, peer: socket.socket) -> None:
        peer.settimeout(5.0)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _SILENCE.items():
            if hasattr(socket, option):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._peers[rank] = peer

    def _tell(self, rank: int, **message: Any) -> bool:
        peer = self._peers.get(rank)
        if peer is None:
            return False
        try:
            peer.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for rank, peer in self._peers.items():
            selector.register(peer, selectors.EVENT_READ, rank)
        partial = dict.fromkeys(self._peers, b"")
        while selector.get_map():
            for key, _ in selector.select():
                rank = key.data
                try:
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                except TimeoutError:
                    continue
                except OSError:
                    data = b""
                *lines, partial[rank] = (partial[rank] + data).split(b"\n")
                leaves = True in [self._hear(rank, json.loads(line)) for line in lines]
                if leaves or not data:
                    selector.unregister(key.fileobj)
                    if not leaves and not self._closing:
                        self._end(rank, None, 1)

    def _hear(self, rank: int, message: dict[str, Any]) -> bool:
        """Act on a message; returns True if it is its sender's last."""
        if "step" in message:
            self.steps[rank] = message["step"]
        elif "error" in message:
            self._end(rank, message["error"], message["exit_code"])
        elif "end" in message:
            self._end(0, "", message["end"])
        return "bye" in message or "error" in message or "end" in message

    def _end(self, rank: int, error: str | None, exit_code: int) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._on_end(rank, error, exit_code)


def _receive_exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise OSError("connection closed")
        data += part
    return data


def _addresses() -> list[str]:
    """This host's IPv4 addresses. The loopback comes first: on another host it is refused at once, so trying it is cheap."""
    found = ["127.0.0.1", *(str(each.ip) for each in addresses().values())]
    with contextlib.suppress(OSError, UnicodeError):  # a name that no server knows, or that none could
        found.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys(found))
