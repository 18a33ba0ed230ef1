"""One stage of the pipeline: what it computes, and in which order. Nothing here knows of other ranks."""
