"""Quantisation to FP8: scales, blocks, and tensors."""
