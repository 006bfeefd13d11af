"""Triton twins of the modules of the same names. No autograd: `passes.py` chooses between them and plain PyTorch."""
