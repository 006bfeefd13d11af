"""What the tests of random streams and recomputation share."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_ext.tensor_parallel import random
from megatron_ext.tensor_parallel._random.process_tracker import Process


@contextmanager
def no_tracker() -> Iterator[None]:
    """Inside, as in a process that never asked for a tracker; afterwards the one that there was."""
    before = Process.tracker, Process.kind
    Process.tracker = None
    try:
        yield
    finally:
        Process.tracker, Process.kind = before


@contextmanager
def seeded(seed: int = 1234, **options) -> Iterator[random.CudaRNGStatesTracker]:
    """A new tracker over the CPU's generator, seeded."""
    with no_tracker():
        random.model_parallel_cuda_manual_seed(seed, device="cpu", **options)
        yield random.get_cuda_rng_tracker()


def drawn(seed: int, *counts: int) -> list[torch.Tensor]:
    """What a generator seeded with `seed` draws, in pieces of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(count, generator=generator) for count in counts]
