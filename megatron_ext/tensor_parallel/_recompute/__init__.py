"""Activation recomputation behind `random.checkpoint` and `CheckpointWithoutOutput`."""
