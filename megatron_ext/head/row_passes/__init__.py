"""Elementwise passes over logits, label terms and token results in plain PyTorch, and the choice of Triton on CUDA."""
