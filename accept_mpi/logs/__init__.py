"""The log that a run leaves behind, and the tools that read it."""
