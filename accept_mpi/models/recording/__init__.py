"""Models whose ``forward`` is any Python: it is recorded once, and the record is cut into the layers of a chain."""
