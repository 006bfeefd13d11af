"""Run Megatron-Core on the CPU and over gloo: on laptops, in CI, and in this project's own tests."""

from megatron_on_cpu.context import megatron_on_cpu

__all__ = ["megatron_on_cpu"]
