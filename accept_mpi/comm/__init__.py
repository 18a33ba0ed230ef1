"""The only package that uses MPI: start and end of a run, agreement between ranks, the data plane, detection of losses."""

import os
from pathlib import Path

from accept_mpi.device.allocator import share_arena
from accept_mpi.device.networks import within_host

# Above its eager limit, Open MPI asks the receiver before it sends (rendezvous). On a slow link with traffic both ways,
# question and answer queue behind bulk data while the link idles (50 Mbit/s, 0.5 MB per micro-batch each way: 156 ms per
# micro-batch instead of 87). Receives are posted in advance, so there is nothing to ask: send up to 4 MiB at once. MPI reads
# these variables when it starts, so they must be set before mpi4py.MPI is first imported; the user's own settings win.
_EAGER_BYTES = 4 << 20
for _name in ("eager_limit", "rndv_eager_limit", "max_send_size"):
    os.environ.setdefault(f"OMPI_MCA_btl_tcp_{_name}", str(_EAGER_BYTES))

# libfabric spends a second at every start on searching for its networks. Hosts without one (InfiniBand and its like,
# Omni-Path, Slingshot) skip that; MPI chooses TCP there anyway.
if not any(Path("/sys/class", kind).is_dir() for kind in ("infiniband", "cxi", "hfi1")):
    for _name in ("btl", "mtl"):
        os.environ.setdefault(f"OMPI_MCA_{_name}", "^ofi")

# Docker's bridge has the same address on every host: MPI would take those of two hosts for a network that both have, and
# wait for ever. Where the user has chosen among networks, also in files of Open MPI, mpirun tells its ranks so. (Unset in a
# process that is no rank, since an mpirun that is started there may be told what to include.)
_NETWORKS = "OMPI_MCA_btl_tcp_if_"
_is_chosen = any(_NETWORKS + _name in os.environ for _name in ("include", "exclude"))
if "PMIX_RANK" in os.environ and not _is_chosen and (_within := within_host()):
    os.environ[_NETWORKS + "exclude"] = ",".join(["127.0.0.1/8", "sppp", *_within])  # the first two are MPI's own

share_arena()  # before MPI starts threads
