"""Simulation of pipeline schedules: Megatron's, Megatron's with layers redistributed, ours, and those of a paper."""
