"""Pipeline schedules simulated: Megatron's own, with layers redistributed, ours, and those of the paper."""
