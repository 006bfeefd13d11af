"""Experiments, which import the rest of the package. Only `run.py` imports an experiment, if its option is given."""
