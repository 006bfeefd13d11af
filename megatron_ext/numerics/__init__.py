"""Products and sums of tensors: in 16 bits on any CPU, in one order, with the same bits in any batch. It knows no head."""
