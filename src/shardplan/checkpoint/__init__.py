"""Weights and training state between files and a sharded model, in both directions."""
