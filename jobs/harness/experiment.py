"""The frame of an experiment: a fleet in the lab, systems measured at many points, results stored and shown."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.device.fleet import Host, read
from accept_mpi.errors import UserError
from accept_mpi.job import Job, flows
from accept_mpi.job_file import parse
from accept_mpi.pipeline.schedule import max_in_flight
from accept_mpi.plan import Plan
from accept_mpi.planning.micro_batches import tried
from edgelab import LabError
from edgelab.laboratory import Laboratory
from harness.session import Session
from harness.store import Point, Result, Store

_PROGRAMS = {"alone": "harness.alone", "ours": "harness.ours", "pipelining": "harness.pipelining", "ddp": "harness.ddp",
             "submodels": "harness.submodels"}  # fmt: skip
_GLOO = ("pipelining", "ddp")
_MOST_SECONDS = 300.0
_NEW_CUTS, _NEW_CUTS_SECONDS = 3, 6.0  # after new cuts, further first steps and seconds (the larger) that do not count


class Experiment:
    """Measures points in the lab and stores their results: ``with experiment.lab(fleet): experiment.measure(...)``.

    ``folder`` has its fleets and jobs, ``out`` its results.
    """

    def __init__(self, file: str) -> None:
        parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
        parser.add_argument("--fresh", action="store_true", help="measure everything again")
        options = parser.parse_args()
        self.folder = Path(file).resolve().parent
        self.out = Path("runs/experiments") / self.folder.name
        self.out.mkdir(parents=True, exist_ok=True)
        if options.fresh:
            (self.out / "results.h5").unlink(missing_ok=True)
        self.store = Store(self.out / "results.h5")
        self._lab: Laboratory | None = None
        self._make: Callable[[], object] = lambda: None
        self._fleet, self._hosts = "", 0
        self._sessions: dict[str, Session] = {}
        self._cuts: object = None
        """Cuts and order of ranks with which the session of accept_mpi trained last."""
        self._stack = ExitStack()
        self._began = time.monotonic()

    @contextmanager
    def fleet(self, name: str, hosts: Sequence[Host]) -> Iterator[None]:
        """Use these hosts in the block. They are created when the block first measures a point without a stored result."""
        with ExitStack() as stack:
            self._lab, self._fleet, self._hosts = None, name, len(hosts)
            self._make = lambda: stack.enter_context(self.lab(name, hosts))
            yield
        self._lab = None

    @contextmanager
    def lab(self, fleet: str, hosts: Sequence[Host] | None = None) -> Iterator[Laboratory]:
        """Create the hosts of a fleet file (or ``hosts``, named ``fleet``), for the time of the block. Raises UserError."""
        hosts = read(self.folder / fleet) if hosts is None else list(hosts)
        with Laboratory("experiment-" + self.folder.name.replace("_", "-")).using(hosts) as lab, ExitStack() as stack:
            self._lab, self._fleet, self._stack = lab, fleet, stack
            self._hosts = len(hosts)
            yield lab
            self.end_sessions()

    def end_sessions(self) -> None:
        """End the programs that have measured so far. They stay alive until then, because starting them again costs more."""
        self._stack.close()
        self._sessions, self._cuts = {}, None

    def job(self) -> str:
        """Path of the job file."""
        return str(self.folder / self.job_file)

    job_file = "job.toml"

    def measure(self, program: str, known: Point, asked: dict[str, Any], link: float | None = None) -> Result:
        """The result at a point; measured unless it is stored already.

        ``known`` names the point in the results; ``asked`` goes to the program; ``link``: Mbit/s of every host (0:
        unlimited; None: as the fleet says). The result has samples_per_s of all ranks together (see ``combined``), and "at",
        the time of the measurement in seconds since the epoch.
        """
        point = {"fleet": self._fleet, "program": program, "link": link} | known
        found = self.store.get(point)
        if found is None:
            try:
                found = self._measure(program, asked, link)
            except LabError as error:
                if program not in _GLOO:
                    raise
                # Gloo sometimes aborts when links change under it: try once more, in new processes.
                print(f"{program} failed and is started again: {str(error).splitlines()[-1]}", file=sys.stderr, flush=True)
                self.end_sessions()
                found = self._measure(program, asked, link)
            found["at"] = time.time()
            self.store.add(point, found)
            text = ", ".join(str(value) for value in known.values())
            where = "" if link is None else f" at {f'{link:g} Mbit/s' if link else 'any rate'}"
            seconds, rate = time.monotonic() - self._began, found["samples_per_s"]
            shown = f": {rate:.1f} samples/s" if rate else ""
            print(f"{seconds:4.0f} s  {program} {text}{where}{shown}", flush=True)
        return found

    def _measure(self, program: str, asked: dict[str, Any], link: float | None) -> Result:
        if self._lab is None:
            self._make()
        assert self._lab is not None
        fresh = False
        if asked.get("skip", ()) is None:
            self._cuts = None  # a process gives back its memory before it measures layers, so it must warm up again
        if program not in self._sessions:
            folder = self._lab.folder / "sessions" / program
            self._sessions[program] = self._stack.enter_context(Session(self._lab, _PROGRAMS[program], folder))
            fresh = bool(asked.get("twice"))
        if fresh:
            self._set_links(None if link is None else 0)
            self._sessions[program].measure(asked, _MOST_SECONDS)
        self._set_links(link)
        answers = self._sessions[program].measure(asked, _MOST_SECONDS)
        return combined(program, answers)

    def _set_links(self, link: float | None) -> None:
        """Set the link of every host to ``link`` Mbit/s (0: unlimited); None leaves them unchanged."""
        assert self._lab is not None
        if link is not None:
            for host in self._lab.hosts:
                self._lab.set(host.name, f"link={link or 'free'}")

    def ours(
        self, link: float | None, settings: dict[str, Any], seconds: float = 6.0, turn: int | None = None, **known: Any
    ) -> Result:
        """Measure accept_mpi with these keys of the job changed, for about ``seconds``. ``turn``: number of a repetition
        with the same plan.

        If cuts or the order of ranks differ from the run before, more first steps do not count: a rank whose stage has grown
        takes memory from the kernel, which for a gigabyte at 0.4 core lasts five to eight seconds.
        """
        batch = int(settings.get("train.batch_size", self.batch))
        rate = self._last[1] if self._last is not None and self._last[0] == settings else batch
        # If a step takes long, the link is the reason, so less warm-up is needed.
        skip = 2 if seconds * rate > batch else 1
        count = max(2, min(40, round(seconds * rate / batch)))
        planned = self.planned(link, settings, **known)
        more: dict[str, Any] = {}
        if planned:
            plan = msgspec.json.decode(planned["plan"], type=Plan)
            more = {
                "pipeline.cuts": [stage.start for stage in plan.stages[1:]],
                "pipeline.ranks": [stage.ranks[0] if len(stage.ranks) == 1 else list(stage.ranks) for stage in plan.stages],
                "pipeline.speeds": [[1 / pace for pace in stage.paces] or [1.0] * len(stage.ranks) for stage in plan.stages],
                "pipeline.forward": [codec.forward for codec in plan.boundaries],
                "pipeline.backward": [codec.backward for codec in plan.boundaries],
            } | ({"pipeline.gradients": plan.gradients} if plan.gradients else {})
            more |= {"train.micro_batches": planned["micro_batches"]} if "micro_batches" in planned else {}
            more |= {"pipeline.lanes": next((lanes for stage in plan.stages for lanes in stage.lanes), "off")}
        pipeline = self._job(settings | more).pipeline
        cuts = (pipeline.cuts, pipeline.ranks or list(range(self._hosts)))
        if "ours" in self._sessions and cuts != self._cuts:
            skip += max(_NEW_CUTS, round(_NEW_CUTS_SECONDS * rate / batch))
        drain = self._drain(settings)
        steps = skip + count + drain
        if turn is not None:
            known = known | {"turn": turn}
        more["train.steps"] = steps
        found = self._train(link, settings, (skip, drain), more, known, not planned, planned.get("log", ""))
        self._cuts = cuts
        self.expect(settings, float(found["samples_per_s"]))
        return found

    def planned(self, link: float | None, settings: dict[str, Any], **known: Any) -> Result:
        """The result of a short run that finds the plan, if the job leaves cuts to rank 0; else empty.

        The plan's speed is then measured in a separate run, like given cuts: for a while after measuring layers a process is
        about 6 % slower.
        """
        if self._job(settings).pipeline.cuts != "auto":
            return {}
        return self._train(link, settings, None, {"train.steps": 1}, known | {"for": "its plan"}, twice=False)

    def by_cuts(self, points: Sequence[tuple[float | None, dict[str, Any]]]) -> list[int]:
        """The order (indices) in which to measure these links and settings so that cuts change as rarely as possible, since
        a process must warm up to new ones. Finds the plans of jobs that leave cuts to rank 0 first."""
        cuts = []
        for link, settings in points:
            found = self.planned(link, settings)
            stages = msgspec.json.decode(found["plan"], type=Plan).stages if found else ()
            cuts.append(str([(stage.start, stage.ranks) for stage in stages] or self._job(settings).pipeline.cuts))
        first = {one: cuts.index(one) for one in cuts}
        return sorted(range(len(points)), key=lambda n: first[cuts[n]])

    def _job(self, settings: dict[str, Any]) -> Job:
        job = Path(self.job())
        return parse(job.read_text(), str(job), [f"{key}={value}" for key, value in settings.items()])

    def _drain(self, settings: dict[str, Any]) -> int:
        """Number of last steps in which a pipeline that flows drains, which is faster than its steady state."""
        pipeline = (job := self._job(settings)).pipeline
        if not flows(pipeline.schedule):
            return 0
        fewest = micro_batches_of(tried(job, self._hosts)[0])
        return -(-max_in_flight(pipeline.schedule, 0, self._hosts, 1 << 30, pipeline.slack) // fewest)

    def expect(self, settings: dict[str, Any], rate: float) -> None:
        """Give the next ``ours`` with these settings an estimate of samples/s, from which it derives the number of steps."""
        self._last = (settings, rate)

    def train(self, link: float | None, settings: dict[str, Any], skip: int, **known: Any) -> Result:
        """Measure accept_mpi with these keys changed, for as many steps as the job has; the first ``skip`` do not count."""
        return self._train(link, settings, (skip, 0), {}, known, twice=False)

    def _train(
        self,
        link: float | None,
        settings: dict[str, Any],
        skip: tuple[int, int] | None,
        more: dict[str, Any],
        known: Point,
        twice: bool,
        cluster: str = "",
    ) -> Result:
        """Run accept_mpi at a point.

        ``skip``: numbers of first and last steps that do not count; None: only the plan is wanted. ``more``: overrides that
        are not part of the point's name. ``twice``: repeat a process's first run, whose steps are slowed by memory from the
        kernel and by oneDNN's choice of routines. ``cluster``: log of the run that found the plan.
        """
        name = "-".join([Path(self._fleet).stem, *(str(value) for value in (known | settings).values()), f"{link}"])
        directory = self.out / "runs" / "".join(c if c.isalnum() else "-" for c in name)
        changed = (
            settings
            | more
            | {
                "output.directory": str(directory.resolve()),
                "output.checkpoint_at_end": "false",
            }
        )
        overrides = [f"{key}={value}" for key, value in changed.items()]
        asked = {"job": self.job(), "set": overrides, "skip": skip, "twice": twice, "survey": cluster}
        return self.measure("ours", settings | known, asked, link)

    batch = 64
    """Samples per step, unless the settings give another number."""
    _last: tuple[dict[str, Any], float] | None = None
    """Settings and rate of the point before, as an estimate for the next: links come in the order of their rates."""

    def finish(self, text: str) -> None:
        """Write the table to ``table.md`` and print it."""
        (self.out / "table.md").write_text(text)
        print(f"\n{text}\n{self.out / 'table.md'}, {self.out / 'results.h5'}, {self.out / 'plot.png'}")


def ranks_of(plan: Plan) -> str:
    """The ranks of each stage of a plan, as text."""
    return " / ".join(",".join(map(str, stage.ranks)) for stage in plan.stages)


def combined(program: str, answers: list[dict[str, Any]]) -> Result:
    """One result from the answers of all ranks: rank 0's, with the samples_per_s of all (summed, or averaged for gloo's)."""
    rates = [float(answer["samples_per_s"]) for answer in answers if answer]
    result: Result = {key: value for key, value in answers[0].items() if value}
    if program in _GLOO:  # each rank has timed the steps of all ranks together
        return result | {"samples_per_s": statistics.fmean(rates)}
    if "probes" in result:
        return {"samples_per_s": 0.0} | {
            key: [answer[key] for answer in answers] for key in ("probes", "intervals", "passes", "layers")
        }
    if "layer_seconds" in result:
        result["layer_seconds"] = [answer["layer_seconds"] for answer in answers]
    return result | {"samples_per_s": sum(rates), "each": rates}


def run(main: Any) -> None:
    """Run an experiment's main; a UserError is printed as one sentence and ends the process with exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"experiment: {error}", file=sys.stderr)
        sys.exit(2)
