"""Measures the time and memory that a model takes on this device."""
