"""Costs of the head and the layers beside their peers: `make bench` on CPU, `make bench-gpu` on one CUDA device."""
