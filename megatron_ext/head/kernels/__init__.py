"""Triton twins of the two row passes. No autograd: `passes.py` chooses between them and plain PyTorch."""
