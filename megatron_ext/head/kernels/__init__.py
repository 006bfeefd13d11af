"""Triton twins of the modules of the same names in `row_passes/`, whose `dispatch.py` chooses. No autograd."""
