"""The floor below every pass of a call: the resolved head, its statistics, the gradient's form, the cut of its work."""
