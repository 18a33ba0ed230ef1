"""The common parts of experiments and sweeps: measuring points one after another, and storing their results.

store (results.h5) · sweep (a job file, many overrides) · session (a program in the lab that measures many points) ·
programs that a session runs: ours, alone, pipelining, ddp, submodels.
"""
