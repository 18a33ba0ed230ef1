"""The common parts of experiments and sweeps: measuring points one after another, and storing their results.

store (results.h5) · sweep (a job file, many overrides) · session (a program in the lab that measures many points) ·
programs that a session runs: ours, alone, pipelining, ddp, submodels.
"""

from accept_mpi.device.openmp import wait_briefly

wait_briefly()  # before torch is imported, as a run's ranks do, and for peers alike
