"""The share of the links' time that is hidden behind computing, and a picture of a step that shows it.

The busiest link's sending is hidden as far as it does not make steps longer. What it adds to a step is found by replaying
the trace on links that take no time (``accept_mpi.logs.replay``).
"""

from pathlib import Path

from accept_mpi.logs.figures import draw_timeline
from accept_mpi.logs.reader import open_log, read_facts
from accept_mpi.logs.replay import link_cost
from accept_mpi.logs.timeline import rank_use, steady_window
from harness.experiment import Experiment, run
from harness.store import table

CASES = ((100, "auto"), (100, "none"), (100, "uniform:4"), (20, "auto"), (20, "uniform:4"), (20, "none"))


def main() -> None:
    experiment = Experiment(__file__)
    rows: list[list[object]] = []
    with experiment.lab("fleet.toml"):
        for link, codec in CASES:
            settings = {"pipeline.forward": codec, "pipeline.backward": codec}
            found = experiment.ours(link, settings, seconds=20.0)
            with open_log(Path(found["log"])) as log:
                trace, facts = log["trace"][:], read_facts(log)
            start, end = steady_window(trace, 5)
            uses = rank_use(trace, start, end)
            megabytes = sum(sum(use.bytes_wire) for use in uses) / 1e6
            bubbles = ", ".join(f"{100 * use.bubble:.0f} %" for use in uses)
            cost = link_cost(trace)
            shares = [f"{100 * seconds / cost.seconds:.1f} %" for seconds in (cost.busiest, cost.exposed)]
            rate = found["samples_per_s"]
            rows.append([link, codec, rate, *shares, f"{cost.hidden:.3f}", f"{megabytes / (end - start):.2f}", bubbles])
            if (link, codec) == CASES[0]:
                hosts = {host["rank"]: host["host"] for host in facts["hosts"]}
                begin, stop = steady_window(trace, 1)
                draw_timeline(experiment.out / "plot.png", trace, hosts, begin, stop)
    head = [
        "Mbit/s",
        "codec",
        "samples/s",
        "busiest link sends",
        "steps shorter without links",
        "hidden share",
        "MB/s over all links",
        "idle share of stages 0, 1, 2, 3",
    ]
    experiment.finish(table(head, rows))


run(main)
