"""Attention: fused, its softmax, rotary embeddings, and packed sequences under context parallelism."""
