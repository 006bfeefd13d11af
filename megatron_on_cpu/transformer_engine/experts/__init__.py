"""Mixtures of experts: the router, and the permutation of tokens to experts and back."""
