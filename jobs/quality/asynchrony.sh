#!/usr/bin/env bash
# What asynchrony costs in learning: schedules and optimizers, the same samples, several seeds, 4 stages. Ends with table.md and
# plot.png of each model in runs/quality. What is finished is not run again. Some three hours on two cores.
#
#   bash jobs/quality/asynchrony.sh gpt        # this model only
set -euo pipefail
cd "$(dirname "$0")/../.."
[[ $# -gt 0 ]] || set -- gpt mobilenetv2
for model in "$@"; do
    bash jobs/sweep.sh "jobs/quality/$model-asynchrony.sweep.toml"
    for more in clipped muon slack; do
        [[ ! -f "jobs/quality/$model-$more.sweep.toml" ]] || bash jobs/sweep.sh "jobs/quality/$model-$more.sweep.toml"
    done
done
