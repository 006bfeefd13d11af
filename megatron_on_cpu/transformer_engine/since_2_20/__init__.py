"""Differences of Transformer Engine 2.20 from 2.11, in terms of what 2.11 has."""
