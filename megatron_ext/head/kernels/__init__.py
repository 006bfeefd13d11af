"""Triton twins of the modules of the same names in `row_passes/`, whose `passes.py` chooses. No autograd."""
