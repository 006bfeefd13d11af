"""The statistics of rows of logits in Triton: of rows that fit into registers, and of longer ones."""
