"""Embedding and lm head shared by all pipeline stages, in Megatron's own training loop."""
