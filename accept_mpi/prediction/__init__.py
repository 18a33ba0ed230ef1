"""Predicts the times of layers that no device has measured, and keeps measured ones from run to run."""
