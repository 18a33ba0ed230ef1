"""State that survives a lost process, host or run, and the way back to training after a loss."""
