"""Products and sums of tensors: in 16 bits on any CPU, in one order, the same in any batch. They know no head."""
