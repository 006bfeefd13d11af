"""What the head and the layers cost beside their peers: `make bench` on CPU, `make bench-gpu` on one CUDA device."""
