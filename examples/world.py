"""Ranks of this run: how many there are, and whether each has a GPU."""

import os
import sys

import torch

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def ranks(*allowed: int) -> int:
    """Count the ranks that torchrun started; 1 without torchrun. Ends the program where `allowed` lacks that number."""
    os.environ.update(_ALONE | os.environ)
    started = int(os.environ["WORLD_SIZE"])
    if allowed and started not in allowed:
        fitting = " or ".join(map(str, allowed))
        sys.exit(
            f"{sys.argv[0]}: started on {started} ranks, runs on {fitting}: torchrun --nproc-per-node {allowed[-1]}"
        )
    return started


def has_gpus() -> bool:
    """Tell whether this machine has a GPU for each of its ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= torch.cuda.device_count()
