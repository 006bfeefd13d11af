"""Triton twins of the two row passes. No autograd: `rows.py` chooses between them and plain PyTorch."""
