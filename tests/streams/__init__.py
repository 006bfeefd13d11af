"""CUDA's streams and NCCL's communicators without a GPU: what is submitted to them, what waits for what, what is freed
too early."""
