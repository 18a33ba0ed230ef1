"""The only place that touches MPI: start and end, agreement, the data plane, who is alive."""

import os

# Open MPI's rendezvous, for messages above its eager limit, asks the receiver first; on a slow link with traffic both ways
# question and answer queue behind bulk data, and the link stands idle meanwhile (50 Mbit/s, 0.5 MB a micro-batch each way:
# 156 ms a micro-batch instead of 87). Receives are posted in advance, so there is nothing to ask: send up to 4 MiB at once.
# MPI reads this when it starts, so it is set before mpi4py.MPI is first imported; what the user has set wins.
_EAGER_BYTES = 4 << 20
for _name in ("eager_limit", "rndv_eager_limit", "max_send_size"):
    os.environ.setdefault(f"OMPI_MCA_btl_tcp_{_name}", str(_EAGER_BYTES))
