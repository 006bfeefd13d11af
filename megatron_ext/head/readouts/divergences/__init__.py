"""Read-outs of a student beside a teacher: divergences over the whole vocabulary."""
