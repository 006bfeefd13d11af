"""The policy worker and its parts: scorer, trainer, refitter, generation, checkpoints."""
