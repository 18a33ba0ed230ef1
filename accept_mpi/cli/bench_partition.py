"""``accept_mpi bench partition``: growth of the partitioner's time with layers and devices, and the distance of its plans
from the lower bound.

Problems are random: layers and devices of unequal speed, four codecs, links of 10 to 100 Mbit/s, memory for four times a
fair share. "in order": devices keep their order; "any order": exact search over subsets and orders of devices; "beam": beam
search, for more devices than the exact search can take.
"""

import argparse
import json
import time
from typing import Any

import numpy as np

from accept_mpi.planning.problem import Problem, cost, lower_bound
from accept_mpi.planning.search import MOST_EXACT, solve

_SIZES = ((50, 4), (50, 8), (100, 16), (200, 16), (50, 10), (100, 10), (200, 10), (200, 32), (500, 128), (1000, 256))
_IN_ORDER = {(50, 4), (50, 8), (100, 16), (200, 16)}


def main(options: argparse.Namespace) -> int:
    """Measure and print a table, or JSON with ``--json``."""
    for devices in (2, 8):  # compile or load the kernels for few and for many devices before the measurement
        solve(random_problem(16, devices), ordered=True)
    rows = []
    for layers, devices in _SIZES:
        kinds = ["in order"] if (layers, devices) in _IN_ORDER else []
        kinds.append("any order" if devices <= MOST_EXACT else "beam")
        rows += [_row(kind, layers, devices, options.repeats) for kind in kinds if kind != "beam" or devices > 16]
    if options.json:
        print(json.dumps(rows))
        return 0
    print(f"{'layers':>7}{'devices':>9}  {'search':<10}{'seconds':>9}{'used':>6}  bottleneck / lower bound")
    for row in rows:
        sizes = f"{row['layers']:>7}{row['devices']:>9}"
        print(f"{sizes}  {row['search']:<10}{row['seconds']:>9.3f}{row['used']:>6}{row['gap']:>10.3f}")
    return 0


def random_problem(layers: int, devices: int, seed: int = 0) -> Problem:
    """A random problem: ``layers`` layers with ever fewer values at their boundaries, on ``devices`` unequal devices."""
    rng = np.random.default_rng(seed)
    speed = rng.choice([1, 2, 4, 8], devices)
    seconds = rng.lognormal(0, 0.7, layers) * 0.02 / speed[:, None] * rng.uniform(0.9, 1.1, (devices, layers))
    values = np.zeros(layers + 1)
    values[1:-1] = rng.choice([1, 1, 4, 6], layers - 1) * 2e4 * np.linspace(1, 0.2, layers - 1)
    state = rng.lognormal(0, 1, layers) * 2e5
    held = rng.lognormal(0, 1, layers) * 4e5
    kept = np.minimum(np.arange(1, devices + 1), 64).astype(float)
    host_link = rng.choice([10e6, 50e6, 100e6], devices) / 8
    share = (state.sum() + kept.mean() * held.sum()) / devices
    return Problem(
        layer_seconds=seconds,
        values=values,
        other=np.zeros(layers + 1),
        rate=np.minimum(host_link[:, None], host_link[None, :]),
        host_link=host_link,
        codecs=("none", "uniform:8", "uniform:4", "uniform:2"),
        bytes_per_value=np.array([4.0, 1.06, 0.56, 0.31]),
        messages=values[:, None] * np.array([0.0, 1.0, 0.8, 0.7]) * 1e-9 / speed[:, None, None],
        state=state,
        saved_bytes=held,
        capacity=np.full(devices, 4 * share),
        in_flight=kept,
        state_copies=np.ones(devices),
    )


def _row(search: str, layers: int, devices: int, repeats: int) -> dict[str, Any]:
    problem = random_problem(layers, devices)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        plan = solve(problem, ordered=search == "in order")
        seconds.append(time.perf_counter() - began)
    gap = cost(problem, plan).bottleneck / lower_bound(problem)
    return {
        "layers": layers,
        "devices": devices,
        "search": search,
        "seconds": min(seconds),
        "used": len(plan.devices),
        "gap": gap,
    }
