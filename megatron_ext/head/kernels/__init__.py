"""Triton twins of the modules of the same names in `row_passes/`, whose `passes.py` chooses. No autograd.

Offsets are 64-bit: T * V/R may pass 2^31. The two passes over logits read nothing back to the host and allocate
nothing, so they can be captured in a CUDA graph.
"""
