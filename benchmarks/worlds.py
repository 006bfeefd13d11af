"""Processes for a measurement: gloo worlds that start, run one function and end."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def start_rank(rank: int, ranks: int, store: str) -> None:
    """Make this process rank `rank` of a gloo world, with its share of the cores."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def _entry(rank: int, ranks: int, store: str, answer: str, body: Callable, arguments: tuple) -> None:
    start_rank(rank, ranks, store)
    try:
        result = body(*arguments)
        if rank == 0:
            torch.save(result, answer)
    finally:
        dist.destroy_process_group()


def run_world(ranks: int, body: Callable, *arguments: Any) -> Any:
    """Run `body(*arguments)` on every rank of a new world, and return rank 0's result; a rank that fails ends all."""
    with tempfile.TemporaryDirectory() as folder:
        answer = str(Path(folder) / "answer.pt")
        mp.spawn(_entry, (ranks, str(Path(folder) / "store"), answer, body, arguments), nprocs=ranks)
        return torch.load(answer, weights_only=False)
