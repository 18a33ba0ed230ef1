"""What surrounds a run: the host file, ``mpirun`` and its restarts, signals, whose the run directory is."""
