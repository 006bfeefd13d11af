"""Inputs of a model: a caller's arguments about sequences, and token ids that a rank alone must refuse."""
