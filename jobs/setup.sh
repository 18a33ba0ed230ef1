# Sourced from the checkout's root with what to install ("." and its extras). Leaves PYTHON and MPIRUN set, and the
# environment that several ranks on one machine need.

VENV="${VENV:-.venv}"
PYTHON="$PWD/$VENV/bin/python"
[[ "$VENV" = /* ]] && PYTHON="$VENV/bin/python"
MPIRUN="$(dirname "$PYTHON")/mpirun"

if [[ ! -x "$PYTHON" ]]; then
    "${PYTHON3:-python3}" -m venv "$VENV"
fi
# Install again only when what decides the packages has changed.
stamp="$(dirname "$PYTHON")/../installed"
wanted="$1 $(cat setup.cfg pyproject.toml | cksum)"
if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    echo "installing $1 into $VENV"
    # torch first and by version: this takes the CPU build where the index has one. TORCH= names another.
    "$PYTHON" -m pip install --quiet --disable-pip-version-check "${TORCH:-torch==2.13.0}"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable "$1"
    echo "$wanted" > "$stamp"
fi

# One computing thread a rank, since all ranks share this machine; more ranks than cores; root, as in containers.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# (":oversubscribe" alone names no policy, and all ranks start on the first host.) Hosts by their full names, and of several
# kinds (accept_mpi/launch/README.md).
export PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe PRTE_MCA_prte_keep_fqdn_hostnames=1
export PRTE_MCA_prte_hetero_nodes=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
