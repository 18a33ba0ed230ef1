"""How near to each other losses can be expected to be: a plain loop, on the CPU, with other roundings.

PYTHONPATH=. python jobs/experiments/gpu/nudged.py
"""

import torch
from plain import loop
from steps import CASES, COMPARED, job_text

from accept_mpi.job_file import parse

_NUDGE = 1e-7


def main() -> None:
    case, _ = CASES["losses"]["MobileNetV2, 32 px, 32 samples"]
    job = parse(job_text(case, "1f1b", COMPARED), "job")
    _, exact = loop(job, COMPARED, "cpu", torch.float64)
    for name, dtype, nudge in (
        (f"float64, weights nudged by {_NUDGE}, against float64", torch.float64, _NUDGE),
        ("float32 against float64", torch.float32, 0.0),
    ):
        _, losses = loop(job, COMPARED, "cpu", dtype, nudge)
        print(f"{name}: losses differ by", *(f"{abs(a / b - 1):.1e}" for a, b in zip(losses, exact, strict=True)))


if __name__ == "__main__":
    main()
