"""The device of tensors in tests marked `gpu`: a GPU, or with `--rehearse` the CPU."""

import torch

GPU = "cuda" if torch.cuda.is_available() else "cpu"
