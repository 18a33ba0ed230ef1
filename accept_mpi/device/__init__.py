"""What this process may use of its machine: memory, cores, threads; and hosts on paper."""
