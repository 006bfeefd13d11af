"""A batch on its way through the ranks: micro-batches, packing, and what loss functions read."""
