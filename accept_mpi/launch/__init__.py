"""The surroundings of a run: the host file, ``mpirun`` and its restarts, signals, ownership of the run directory."""
