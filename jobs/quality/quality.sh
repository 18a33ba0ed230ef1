#!/usr/bin/env bash
# What low-bit boundaries cost in learning: each codec, several seeds, 4 stages. Ends with table.md and plot.png of each
# model in runs/quality. What is finished is not run again. Some two hours on two cores.
#
#   bash jobs/quality/quality.sh cnn gpt        # these models only
set -euo pipefail
cd "$(dirname "$0")/../.."
[[ $# -gt 0 ]] || set -- cnn gpt mobilenetv2
for model in "$@"; do
    bash jobs/sweep.sh "jobs/quality/$model.sweep.toml"
done
