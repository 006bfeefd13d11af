"""Adapters on an lm head: low-rank parts of its logits, and what PEFT puts in its place."""
