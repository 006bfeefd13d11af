"""Matrix products and sums: in 16 bits on any CPU, in one order, the same in any batch. No code here knows a head."""
