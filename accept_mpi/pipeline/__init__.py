"""What one stage of the pipeline does, and in which order. One process's business: nothing here knows of other ranks."""
