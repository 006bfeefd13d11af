"""A policy's model on one rank, by DTensor or by Megatron: the parts of a worker ask `Backend` alone."""
