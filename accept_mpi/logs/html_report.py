"""The report of a run: pictures, and one HTML page that holds them and the run's facts."""

import base64
import html
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accept_mpi.direction import Direction
from accept_mpi.errors import UserError, counted
from accept_mpi.files.regular import replacing
from accept_mpi.logs.figures import draw_course, draw_loss, draw_timeline, pyplot
from accept_mpi.logs.format import Rows, rows_of
from accept_mpi.logs.reader import log_in, open_log, read_facts
from accept_mpi.logs.replay import link_cost
from accept_mpi.logs.timeline import of_kind, plans_of, rank_use, samples_per_second, steady_window, timed

_STEPS = 3  # in the timeline, at most


def write_report(log: Path, out: Path | None = None) -> list[Path]:
    """Write timeline.png, loss.png, report.html and, if the plan changed, course.png into ``out``; returns their paths.

    ``out`` defaults to the log's folder, where pictures of an earlier run do not stay. A picture without data (the run ended
    before its first step) is left out, and the page says so. Raises UserError if the log cannot be read or the report cannot
    be written.
    """
    pyplot()  # fail before anything is written
    folder = out or log_in(log).parent
    with open_log(log) as file:
        facts = read_facts(file)
        tables = {name: rows_of(file, name) for name in ("steps", "evals", "metrics", "events")}
        tables["trace"] = timed(file["trace"][:])
        tables["plans"] = plans_of(file)
        created = str(file.attrs["created"])
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        start, end = steady_window(tables["trace"], _STEPS)
        hosts = {host["rank"]: host.get("host", "") for host in facts.get("hosts", [])}
        if end > start:
            written.append(_beside(folder / "timeline.png", lambda p: draw_timeline(p, tables["trace"], hosts, start, end)))
        texts = tables["events"]["text"]
        losses = tables["events"][
            np.logical_or.reduce([np.char.startswith(texts, word) for word in (b"lost ", b"moved ", b"dealt ")])
        ]
        if len(losses) and len(tables["steps"]):
            draw = lambda p: draw_course(p, tables["trace"], tables["steps"], losses, hosts)  # noqa: E731
            written.append(_beside(folder / "course.png", draw))
        if len(tables["steps"]):
            written.append(_beside(folder / "loss.png", lambda p: draw_loss(p, tables["steps"], tables["evals"])))
        page = _page(facts, tables, created, (start, end), {path.stem: path for path in written})
        for name in ("timeline.png", "course.png", "loss.png") if out is None else ():
            if folder / name not in written:
                (folder / name).unlink(missing_ok=True)
        written.append(_beside(folder / "report.html", lambda p: p.write_text(page, "utf-8", "backslashreplace")))
    except OSError as error:
        why = "it is not a directory" if os.path.lexists(folder) and not os.path.isdir(folder) else error.strerror or error
        raise UserError(f"{folder}: cannot write the report: {why}") from error
    return written


def _beside(path: Path, write: Callable[[Path], Any]) -> Path:
    with replacing(path) as temporary:
        write(temporary)
    return path


def _page(
    facts: dict[str, Any], tables: dict[str, Rows], created: str, shown: tuple[float, float], pictures: dict[str, Path]
) -> str:
    job = facts["job"]
    title = f"{job['model']['name']} on {job['data']['name']}"
    count = min(_STEPS, len(np.unique(of_kind(tables["trace"], "F", "B", "W", "U")["step"])))
    timeline_note = (
        f"{counted(count, 'step').capitalize()} in the middle of the run. Thin bars below a rank: what it is sending. "
        f"{_links(tables['trace'], tables['plans'])}"
    )
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p class=sub>{html.escape(job['pipeline']['schedule'])} on {counted(len(facts.get('hosts', [])), 'rank')}, "
        f"begun {html.escape(created)}</p>",
        _cards(facts, tables),
        _picture("Timeline", pictures.get("timeline"), timeline_note, "No step was finished, so there is no timeline."),
        *([_picture("The whole run", pictures["course"], _LOSSES, "")] if "course" in pictures else []),
        _picture("Loss", pictures.get("loss"), "", "No step was finished, so there is no loss."),
        "<h2>Stages</h2>",
        _stages(facts, tables, shown),
        "<p class=note>Bubbles and what was sent are those of the steps in the timeline; coding: the seconds of making "
        "messages and reading them, as a share of those of computing.</p>"
        if count
        else "",
        _reasons(facts),
        "<h2>Hosts</h2>",
        _hosts(facts),
        "<h2>Events</h2>",
        _table(
            ("second", "step", "what"),
            ((f"{e['time']:.1f}", e["step"], e["text"].decode(errors="replace")) for e in tables["events"]),
        ),
        "<details><summary>Job</summary><pre>" + html.escape(json.dumps(job, indent=1)) + "</pre></details>",
        "<details><summary>Versions</summary>"
        + _table(("package", "version"), facts.get("versions", {}).items())
        + "</details>",
    ]
    return "\n".join([_HEAD.replace("TITLE", html.escape(title)), *body, _FOOT])


def _links(trace: Rows, plans: Rows) -> str:
    """A sentence on the time that the links cost; empty if the trace is too short to tell."""
    cost = link_cost(trace, plans)
    if not cost.busiest:
        return ""
    return (
        f"On the busiest link something was under way {_percent(cost.busiest / cost.seconds)} of the time; computing hid "
        f"{_percent(cost.hidden)} of that: links that take no time would have saved {_percent(cost.exposed / cost.seconds)}."
    )


def _cards(facts: dict[str, Any], tables: dict[str, Rows]) -> str:
    """The key figures at the top of the page: steps, speed, losses, metrics, time, parameters."""
    steps, evals = tables["steps"], tables["evals"]
    cards = [("steps", f"{steps['step'][-1]} of {facts.get('last_step', '?')}" if len(steps) else "none")]
    if len(steps):
        cards.append(("samples/s", f"{samples_per_second(steps[len(steps) // 2 :]):.1f}"))
        cards.append(("last training loss", f"{steps['loss'][-1]:.4f}"))
        cards.append(("time", f"{steps['end'][-1]:.0f} s"))
    if len(evals):
        cards.append(("test loss", f"{evals['loss'][-1]:.4f}"))
        if math.isfinite(evals["accuracy"][-1]):
            cards.append(("test accuracy", _percent(evals["accuracy"][-1])))
    newest = {name.decode(errors="replace").rpartition(":")[2]: value for _, name, value in tables["metrics"]}
    cards += [(f"test {name}", f"{value:.4g}") for name, value in newest.items()]
    cards.append(("parameters", f"{facts.get('parameters', 0):,}"))
    items = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in cards)
    return f"<dl class=cards>{items}</dl>"


def _picture(heading: str, path: Path | None, note: str, without: str) -> str:
    if path is None:
        return f"<h2>{heading}</h2><p>{without}</p>"
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<h2>{heading}</h2><img alt="{heading}" src="data:image/png;base64,{data}"><p class=note>{note}</p>'


def _stages(facts: dict[str, Any], tables: dict[str, Rows], shown: tuple[float, float]) -> str:
    """A table of the stages in the plan that the timeline shows, with the bubble and bytes sent of their ranks."""
    use = {(u.stage, u.rank): u for u in rank_use(tables["trace"], *shown)} if shown[1] > shown[0] else {}
    plans = tables["plans"]
    begun = plans["time"][plans["time"] <= shown[0]]
    plan = plans[plans["time"] == (begun.max() if len(begun) else plans["time"].min())]
    names, groups = facts.get("layers", []), len(plan) > len(np.unique(plan["stage"]))
    rows = []
    for s in np.unique(plan["stage"]).tolist():
        stage = plan[plan["stage"] == s]
        first, last = int(stage["start"][0]), int(stage["stop"][0]) - 1
        layers = f"{first}..{last} ({names[first]} .. {names[last]})" if last < len(names) else f"{first}..{last}"
        for number, rank in enumerate(stage["rank"].tolist()):
            row: list[object] = ["" if number else s, rank, "" if number else layers]
            if (s, rank) in use:
                u = use[s, rank]
                row += [_percent(u.bubble), _percent(u.coding / u.busy if u.busy else math.nan)]
                row += [*(_bytes(u.bytes_raw[way], u.bytes_wire[way]) for way in Direction)]
                row += [_bytes(u.bytes_sum, u.bytes_sum)] if groups else []
            rows.append(row)
    head = ("stage", "rank", "layers", "bubble", "coding", "sent forward", "sent backward", *(["summed"] if groups else []))
    return _table(head, rows)


def _reasons(facts: dict[str, Any]) -> str:
    """The planner's printed reasons for cuts and codecs; empty if the job gave both."""
    lines = [*facts.get("plan_why", []), *facts.get("codecs_why", [])]
    if not lines:
        return ""
    return "<details><summary>Why these cuts and codecs</summary><pre>" + html.escape("\n".join(lines)) + "</pre></details>"


def _hosts(facts: dict[str, Any]) -> str:
    rows = [
        (
            host.get("rank"),
            host.get("host"),
            host.get("machine", ""),
            host.get("cores", ""),
            f"{host.get('memory_bytes', 0) / 2**30:.1f} GiB",
        )
        for host in facts.get("hosts", [])
    ]
    return _table(("rank", "host", "machine", "cores", "memory"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    if not lines:
        return "<p>None.</p>"
    heads = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    return f"<div class=wide><table><tr>{heads}</tr>{''.join(lines)}</table></div>"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else "none"


def _bytes(raw: int, wire: int) -> str:
    if not raw:
        return "-"
    return f"{wire / 2**20:.1f} MiB" + (f" (from {raw / 2**20:.1f})" if wire < 0.95 * raw else "")


_LOSSES = "Dashed: a rank was lost and the others went on from the newest snapshot, or layers moved between ranks."

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title><style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin-top: 2rem } .sub, .note { opacity: .7; margin-top: .2rem }
img { width: 100%; height: auto; background: #fff; border-radius: 6px }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; padding: 0 }
.cards div { border: 1px solid #8885; border-radius: 6px; padding: .5rem .9rem }
dt { opacity: .7; font-size: .85rem } dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #8883; vertical-align: top }
pre { overflow-x: auto; font-size: .85rem } details { margin-top: 1rem }
</style></head><body>"""
_FOOT = """</body></html>
"""
