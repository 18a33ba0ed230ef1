"""The only place that touches MPI: start and end, agreement, the data plane, who is alive."""

import os
from pathlib import Path

# Open MPI's rendezvous, for messages above its eager limit, asks the receiver first; on a slow link with traffic both ways
# question and answer queue behind bulk data, and the link stands idle meanwhile (50 Mbit/s, 0.5 MB a micro-batch each way:
# 156 ms a micro-batch instead of 87). Receives are posted in advance, so there is nothing to ask: send up to 4 MiB at once.
# MPI reads this when it starts, so it is set before mpi4py.MPI is first imported; what the user has set wins.
_EAGER_BYTES = 4 << 20
for _name in ("eager_limit", "rndv_eager_limit", "max_send_size"):
    os.environ.setdefault(f"OMPI_MCA_btl_tcp_{_name}", str(_EAGER_BYTES))

# libfabric looks for its networks for a second at every start. A host without one (InfiniBand and its like, Omni-Path,
# Slingshot) need not ask it; MPI itself chooses TCP there.
if not any(Path("/sys/class", kind).is_dir() for kind in ("infiniband", "cxi", "hfi1")):
    for _name in ("btl", "mtl"):
        os.environ.setdefault(f"OMPI_MCA_{_name}", "^ofi")
