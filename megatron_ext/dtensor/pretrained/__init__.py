"""Sharded models loaded from, and saved to, folders in transformers' format."""
