"""Where a test marked `gpu` puts its tensors: on a GPU, or with `--rehearse` on the CPU."""

import torch

GPU = "cuda" if torch.cuda.is_available() else "cpu"
