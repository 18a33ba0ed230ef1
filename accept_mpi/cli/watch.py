"""``accept_mpi watch``: a run while it trains, as a page at 127.0.0.1 or on the terminal."""

import contextlib
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live as LiveDisplay
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from accept_mpi.errors import UserError
from accept_mpi.launch.ownership import is_held
from accept_mpi.logs.live import Live
from accept_mpi.logs.progress import duration
from accept_mpi.logs.reader import log_in

_EVERY = 1.0  # seconds
_SILENT = 60.0  # seconds after which a log that no process writes is of a run that has ended
_GONE = "ended before its last step"
_LEAST, _BETWEEN = 20, 2  # characters of a timeline, at least, and in front of it
_COLOURS = {"F": "blue", "B": "yellow", "W": "magenta", "U": "green", "E": "white"}


class _Answers(BaseHTTPRequestHandler):
    """Says nothing of requests, nor of browsers that leave before their answer comes."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def serve(path: Path, port: int) -> int:
    """Serve the page until Ctrl-C. ``port``: 0 takes a free one. Raises UserError if there is no log, or the port is
    taken."""
    live = Live(log_in(path))
    page = (files("accept_mpi.logs") / "watch.html").read_bytes()

    class Handler(_Answers):
        def do_GET(self) -> None:
            if self.path == "/":
                self._answer(page, "text/html; charset=utf-8")
            elif self.path == "/state":
                try:
                    found: Any = _state(live)
                except (UserError, OSError) as error:
                    found = {"error": str(error)}
                self._answer(json.dumps(found).encode(), "application/json")
            else:
                self.send_error(404)

        def _answer(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}") from error
    print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends)", flush=True)
    try:
        server.serve_forever()
    finally:
        server.server_close()
        live.close()
    return 0


def on_terminal(path: Path) -> int:
    """Show the run on the terminal until it is over, or Ctrl-C. Where the output is no terminal, shows it once. Raises
    UserError if there is no log."""
    live = Live(log_in(path))
    try:
        console = Console()
        if not sys.stdout.isatty():
            console.print(_shown(_state(live), console))
            return 0
        with LiveDisplay(console=console, refresh_per_second=4) as display:
            shown = Group()
            while True:
                try:
                    state = _state(live)
                except (UserError, OSError) as error:  # another run is about to begin under the same name
                    display.update(Group(shown, Text(str(error))))
                else:
                    shown = _shown(state, console)
                    display.update(shown)
                    if state["over"] or state["gone"]:
                        return 0
                time.sleep(_EVERY)
    finally:
        live.close()


def _state(live: Live) -> dict[str, Any]:
    """``Live.state``, and whether the run is ``gone``: it has not come to its end, and no process of it is left."""
    state = live.state()
    silent = time.time() - os.stat(live.path).st_mtime > _SILENT
    return state | {"gone": not state["over"] and silent and not is_held(live.path.parent)}


def _shown(state: dict[str, Any], console: Console) -> Group:
    loss = state["loss"][-1][1] if state["loss"] else None
    left = "done" if state["over"] else f"{duration(state['left'])} left" if state["left"] is not None else ""
    left = _GONE if state["gone"] else left
    at = f"  {state['schedule']}, step {state['step']} of {state['steps']}{', ' if left else ''}{left}"
    head = Text.assemble((state["title"], "bold"), at)
    figures = Text(f"{_text(state['rate'], 1)} samples/s   loss {_text(loss)}")
    if state["test"]:
        _, value, accuracy = state["test"][-1]
        figures.append(f"   test loss {_text(value)}")
        if accuracy is not None:
            figures.append(f"   accuracy {100 * accuracy:.2f} %")
    for name, points in state["metrics"].items():
        figures.append(f"   {name} {_text(points[-1][1])}")
    bar = Table.grid()
    bar.add_row(ProgressBar(total=max(1, state["steps"]), completed=state["step"], width=min(60, console.width)))
    links = [
        f"{one['boundary']} {'>' if one['way'] == 'forward' else '<'} {one['boundary'] + 1}  {_text(one['mbit'], 1)} Mbit/s"
        for one in state["links"]
    ]
    events = [f"{_text(at, 1):>8} s  step {step}  {text}" for at, step, text in state["events"][:5]]
    return Group(head, bar, figures, Text(), *_stages(state, console), Text("   ".join(links)), Text(), *map(Text, events))


def _stages(state: dict[str, Any], console: Console) -> list[Table | Text]:
    """A table of the stages, with their timelines and a legend of those if the console has room for them."""
    head = ["stage", "host", "layers", "computing"]
    rows: list[list[str | Text]] = []
    for rank in state["ranks"]:
        busy = "" if rank["busy"] is None else f"{100 * rank['busy']:.0f} %"
        rows.append([str(rank["stage"]), f"{rank['host']} (rank {rank['rank']})", f"{rank['first']}..{rank['last']}", busy])
    width = console.width - sum(max(map(cell_len, map(str, cells))) + _BETWEEN for cells in zip(head, *rows, strict=True))
    legend = []
    if width >= _LEAST:
        coloured = _unicode() and console.color_system is not None and not console.no_color
        for rank, row in zip(state["ranks"], rows, strict=True):
            row.append(_strip(state, rank["rank"], width, coloured))
        head.append(f"the newest {state['window'][1] - state['window'][0]:.2f} s")
        legend.append(Text.assemble(*((f"{kind} ", colour) for kind, colour in _COLOURS.items())))
    table = Table(box=None, pad_edge=False, padding=(0, _BETWEEN, 0, 0), show_edge=False)
    for name in head:
        table.add_column(name, justify="right" if name in ("stage", "computing") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return [table, *legend]


def _strip(state: dict[str, Any], rank: int, width: int, coloured: bool) -> Text:
    """A rank's timeline: each character is what most of its time went into, a block in its colour or a letter."""
    begin, end = state["window"]
    each = max(end - begin, 1e-9) / width
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for of, kind, start, stop, *_ in state["bars"]:
        if of != rank or kind not in _COLOURS:
            continue
        for n in range(max(0, int(start / each)), min(width, int(stop / each) + 1)):
            covered = min(stop, (n + 1) * each) - max(start, n * each)
            shares[n][kind] = shares[n].get(kind, 0.0) + covered
    found = Text()
    for share in shares:
        kind = max(share, key=lambda one: share[one]) if share and sum(share.values()) > each / 2 else ""
        found.append("█" if kind and coloured else kind or ("·" if _unicode() else "."), _COLOURS.get(kind, "dim"))
    return found


def _unicode() -> bool:
    return "utf" in (sys.stdout.encoding or os.environ.get("LANG", "")).lower()


def _text(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
