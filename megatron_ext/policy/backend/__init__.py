"""A policy's model on one rank, sharded by DTensor or by Megatron: the parts of a worker call only `Backend`."""
