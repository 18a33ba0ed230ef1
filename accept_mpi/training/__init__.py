"""A run from its job to its end, in which all ranks take part together."""
