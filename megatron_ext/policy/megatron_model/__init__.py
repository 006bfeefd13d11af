"""Megatron-Core's GPTModel as a policy: its layout over ranks, its chunks as one module, Llama's weights."""
