"""Train one neural network on a few unequal machines over a slow network.

``mpirun -hostfile edges python -m accept_mpi train job.toml``
"""

from pathlib import Path

from accept_mpi.version import __version__

__all__ = ["__version__"]

# In a checkout the kernels lie beside this folder, not in it (setup.cfg maps them to accept_mpi.kernels). Python run from
# the checkout's root finds this folder first, installed or not, so it must be able to find the kernels from here too.
_checkout = Path(__file__).resolve().parent.parent
if not (_checkout / "accept_mpi" / "kernels").is_dir() and (_checkout / "kernels" / "options.py").is_file():
    __path__.append(str(_checkout))
