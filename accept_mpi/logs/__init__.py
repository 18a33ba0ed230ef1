"""What a run leaves behind, and how people read it."""
