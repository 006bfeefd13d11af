"""The generators, streams and seeds behind `random.py`."""
