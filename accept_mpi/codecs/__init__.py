"""Tensors as bytes on the wire."""
