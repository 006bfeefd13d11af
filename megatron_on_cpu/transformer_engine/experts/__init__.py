"""Mixtures of experts: the router, and tokens on their way to experts and back."""
