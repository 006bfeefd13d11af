"""Bytes and time of lm heads in a training step, counted by running their code on tensors without memory.

`python -m megatron_ext.memory` prints both for the sizes of a job.
"""
