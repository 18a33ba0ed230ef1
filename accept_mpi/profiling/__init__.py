"""What a model takes on this device, measured."""
