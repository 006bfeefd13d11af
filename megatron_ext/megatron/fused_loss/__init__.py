"""The fused loss inside Megatron's models: settings, promised logits, and the report of what was fused."""
