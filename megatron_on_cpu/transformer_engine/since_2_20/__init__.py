"""Functions that differ in Transformer Engine 2.20, expressed by those of 2.11."""
