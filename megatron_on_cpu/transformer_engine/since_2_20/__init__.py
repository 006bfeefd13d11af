"""What 2.20 of Transformer Engine has otherwise than 2.11, or only since, in terms of what 2.11 has."""
