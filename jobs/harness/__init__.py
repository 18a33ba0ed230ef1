"""What experiments and sweeps share: points that are measured one after another, and where their results are kept.

store (results.h5) · sweep (a job file, many overrides) · session (a program in the lab that measures many points) ·
programs that a session runs: ours, alone, pipelining, ddp.
"""
