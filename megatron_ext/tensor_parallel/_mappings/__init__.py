"""The collectives behind `mappings.py`."""
