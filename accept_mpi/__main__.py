"""Entry point of ``python -m accept_mpi``."""

from accept_mpi.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
