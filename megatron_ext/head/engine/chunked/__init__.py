"""Read-outs chunk by chunk: where a chunk's logits come from, the passes over them, and their gradient."""
