"""A run from its job to its end; all ranks together."""
