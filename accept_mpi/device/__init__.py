"""Memory, cores and threads that this process may use of its machine; and descriptions of hosts."""
