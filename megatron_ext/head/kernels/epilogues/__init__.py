"""Matrix products with the head's weight whose epilogue takes exponentials, so that no logits are written."""
