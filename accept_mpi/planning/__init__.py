"""Makes plans from cluster profiles. Pure: nothing here measures, reads files or talks to other ranks."""
