"""Sharded checkpoints: written whole or not at all, and loaded in any layout of ranks."""

from megatron_ext.policy.checkpoint.sharded_files import Found, Part, find, must_hold, read, save_together

__all__ = ["Found", "Part", "find", "must_hold", "read", "save_together"]
