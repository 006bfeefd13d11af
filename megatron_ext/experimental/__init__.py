"""Experiments: they import the rest of the package, and `run.py` alone imports them, when it is asked for one."""
