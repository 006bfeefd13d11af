"""Megatron-Core on CPU and gloo: laptops, CI, and this project's own tests."""

from megatron_on_cpu.context import megatron_on_cpu

__all__ = ["megatron_on_cpu"]
