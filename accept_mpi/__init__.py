"""Train one neural network on a few unequal machines over a slow network.

``mpirun -hostfile edges python -m accept_mpi train job.toml``
"""

from pathlib import Path
from typing import TYPE_CHECKING

from accept_mpi.version import __version__

if TYPE_CHECKING:
    import os

    from accept_mpi.logs.frames import Run

__all__ = ["__version__", "open_run"]

# In a checkout, kernels/ is next to this folder rather than inside it (setup.cfg maps it to accept_mpi.kernels). Python
# started in the checkout's root finds this folder first, installed or not, so the kernels must be found from here as well.
_checkout = Path(__file__).resolve().parent.parent
if not (_checkout / "accept_mpi" / "kernels").is_dir() and (_checkout / "kernels" / "options.py").is_file():
    __path__.append(str(_checkout))


def open_run(path: "str | os.PathLike[str]") -> "Run":
    """The log of a run, finished or not, as pandas frames: ``open_run("runs/x").steps.plot(x="step", y="loss")``. ``path``
    is a run's directory or its log. Raises ``errors.UserError`` if there is none."""
    from accept_mpi.logs.frames import Run

    return Run(path)
