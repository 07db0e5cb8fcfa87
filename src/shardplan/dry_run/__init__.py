"""A training step of the real-size model without weights or ranks: what raises, and what is sent."""
