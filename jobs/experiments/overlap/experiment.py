"""What fraction of the links' time is hidden behind computing, and a picture of three steps that shows it."""

from pathlib import Path

from accept_mpi.figures import draw_timeline
from accept_mpi.log import open_log, read_facts
from accept_mpi.timeline import hidden_share, stage_use, steady_window
from harness.experiment import Experiment, run
from harness.store import table

CASES = ((100, "auto"), (100, "uniform:4"), (20, "auto"), (20, "uniform:4"), (20, "none"))


def main() -> None:
    experiment = Experiment(__file__)
    rows: list[list[object]] = []
    with experiment.lab("fleet.toml"):
        for link, codec in CASES:
            settings = {"pipeline.forward": codec, "pipeline.backward": codec}
            found = experiment.ours(link, settings, seconds=8.0)
            with open_log(Path(found["log"])) as log:
                trace, facts = log["trace"][:], read_facts(log)
            start, end = steady_window(trace, 5)
            uses = stage_use(trace, start, end)
            megabytes = sum(sum(use.bytes_wire) for use in uses) / 1e6
            bubbles = ", ".join(f"{100 * use.bubble:.0f} %" for use in uses)
            hidden = hidden_share(trace, start, end)
            rows.append([link, codec, found["samples_per_s"], f"{hidden:.3f}", f"{megabytes / (end - start):.2f}", bubbles])
            if (link, codec) == CASES[0]:
                hosts = {host["rank"]: host["host"] for host in facts["hosts"]}
                begin, stop = steady_window(trace, 1)
                draw_timeline(experiment.out / "plot.png", trace, hosts, begin, stop)
    head = [
        "Mbit/s",
        "codec",
        "samples/s",
        "hidden share of sending",
        "MB/s over all links",
        "idle share of stages 0, 1, 2, 3",
    ]
    experiment.finish(table(head, rows))


run(main)
