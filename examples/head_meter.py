"""Costs of one call of the head in a model that is being trained: memory, time and collectives.

The head is everything from the last hidden states to the per-token losses, and back to the gradients of the hidden
states and the output weight. The model runs it at the sizes of the run, with a decoder that returns its input, so that
nothing else is allocated or communicated.
"""

import time
from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.memory.byte_counter import ByteCounter

REPEATS = 10


def head_step(model, tokens_BS: Tensor, labels_BS: Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward of the head of `model`, the last stage's unwrapped GPTModel."""
    config = model.config
    seq = tokens_BS.shape[1] // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    hidden_SBH = torch.randn(
        seq, tokens_BS.shape[0], config.hidden_size, device=tokens_BS.device, dtype=config.params_dtype
    ).requires_grad_()
    position_ids = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)

    def step() -> None:
        hidden_SBH.grad = None
        loss_BS = model(tokens_BS, position_ids, None, decoder_input=hidden_SBH, labels=labels_BS)
        loss_BS.mean().backward()

    return step


def peak_mib(step: Callable[[], None], device: torch.device) -> float:
    """Return the peak of memory allocated during `step`, in MiB above the memory allocated before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with ByteCounter() as found:
        step()
    return found.peak_bytes / 2**20


@contextmanager
def in_dtype(model, dtype: torch.dtype):
    """Round the weights of `model` to `dtype` inside the context, for measurements; drop their gradients."""
    weights, before = {param: param.data for param in model.parameters()}, model.config.params_dtype
    model.config.params_dtype = dtype
    for param in weights:
        param.data, param.grad = param.data.to(dtype), None
    try:
        yield
    finally:
        model.config.params_dtype = before
        for param, data in weights.items():
            param.data, param.grad = data, None


def measure_head(model, tokens_BS: Tensor, labels_BS: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Measure a head step on this rank: its peak MiB, milliseconds (of the fastest) and number of collectives.

    All tensor-parallel ranks call it at the same time. `dtype` is that of weights, hidden states and their gradients.
    """
    without_layers = mock.patch.object(model.decoder, "forward", lambda hidden_states, **kwargs: hidden_states)
    with without_layers, in_dtype(model, dtype):
        step = head_step(model, tokens_BS, labels_BS)
        step()  # the first call fills caches
        peak = peak_mib(step, tokens_BS.device)
        times_ms = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            step()
            if tokens_BS.is_cuda:
                torch.cuda.synchronize()
            times_ms.append((time.perf_counter() - start) * 1e3)
        # Backward must run in this thread, the only one in which the counter sees collectives.
        with torch.autograd.set_multithreading_enabled(False), count_collectives() as counts:
            step()
    return {"peak_mib": peak, "time_ms": min(times_ms), "collectives": sum(counts.values())}
