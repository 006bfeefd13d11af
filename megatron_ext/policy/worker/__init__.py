"""The policy worker and its calls: training, scoring, generation."""
