"""Times that nobody has measured."""
