"""Products by a vocabulary's weight whose epilogue takes exponentials, so that no logits are written."""
