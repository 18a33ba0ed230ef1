"""The only place that touches MPI: start and end, agreement, the data plane, who is alive."""
