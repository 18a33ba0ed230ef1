"""What survives a lost process, host or run."""
