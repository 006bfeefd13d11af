"""Helpers of these tests: a config, shards of full tensors, how close is close, and trackers of random streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _symmetric_memory

from megatron_ext.distributed import symmetric_matmul
from megatron_ext.tensor_parallel import layers, random
from megatron_ext.tensor_parallel._random.process_tracker import Process


@dataclass
class Config:
    """Fields of Megatron's config that the layers read in a test; what is missing takes its default."""

    params_dtype: torch.dtype = torch.float32
    use_cpu_initialization: bool = True
    perform_initialization: bool = True
    sequence_parallel: bool = False
    gradient_accumulation_fusion: bool = False
    expert_model_parallel_size: int = 1
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    deterministic_mode: bool = False
    _cpu_offloading_context: Any = None
    cpu_offloading_activations: bool = True
    tp_comm_overlap: bool = False
    batch_invariant_mode: bool = False
    normalization: str = "RMSNorm"  # of the layers for decoding
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False


CLASSES = {  # of each kind of layer, and what its constructor demands
    "column": ("ColumnParallelLinear", {}),
    "row": ("RowParallelLinear", {"bias": True, "input_is_parallel": True, "skip_bias_add": False}),
    "embedding": ("VocabParallelEmbedding", {}),
}


def build(kind: str, *sizes: int, package: Any = layers, **options: Any) -> Any:
    """A layer of that kind: ours, or that of Megatron's `layers`. `options` go to its constructor."""
    name, demanded = CLASSES[kind]
    given = {"config": Config(), "init_method": torch.nn.init.normal_, **demanded, **options}
    return getattr(package, name)(*sizes, **given)


def world() -> dist.ProcessGroup | None:
    """The group of all ranks, or None in a process that stands alone."""
    return dist.group.WORLD if dist.is_initialized() else None


def alone() -> dist.ProcessGroup:
    """A group of this rank only."""
    return dist.new_subgroups(1)[0]


def piece(full: Tensor, dim: int) -> Tensor:
    """This rank's equal piece of `full` along `dim`, a copy that may have a gradient of its own."""
    part = full.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return part.clone(memory_format=torch.contiguous_format)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_as_good(actual: Tensor, plain: Tensor, truth: Tensor, factor: float = 2.0) -> None:
    """`actual` has the shape and dtype of `plain`, PyTorch's own result, and at most `factor` times its error.

    Both errors are root mean squares against the float64 `truth`; a floor of a quarter of the dtype's rounding of
    the typical value stands for results that PyTorch happens to get exactly right.
    """
    assert actual.shape == plain.shape
    assert actual.dtype == plain.dtype

    def rms(x: Tensor) -> float:
        return x.double().square().mean().sqrt().item()

    allowed = factor * rms(plain - truth) + 0.25 * torch.finfo(plain.dtype).eps * rms(truth)
    error = rms(actual - truth)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def assert_pieces_as_good(found, dims, plain, truth, factor: float = 2.0) -> None:
    """Assert each of `found` as good beside this rank's piece of `plain` and `truth` along its dim; None: all of it."""
    for actual, dim, *wholes in zip(found, dims, plain, truth, strict=True):
        like, true = (whole if dim is None else piece(whole, dim) for whole in wholes)
        if actual.numel():
            assert_as_good(actual, like, true, factor)
        else:
            assert actual.shape == like.shape


@contextmanager
def symmetric_memory() -> Iterator[None]:
    """Pretend GPUs that reach each other's memory: operators get the CPU kernels that PyTorch shows the compiler."""
    cpu = torch.library.Library("symm_mem", "IMPL", "CPU")
    symmetric_matmul._found.clear()
    try:
        cpu.impl("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul_fallback)
        cpu.impl("fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter_fallback)
        with mock.patch.object(symmetric_matmul, "_lacking", return_value=None):
            yield
    finally:
        symmetric_matmul._found.clear()
        cpu._destroy()


def plain_linear(dtype, x, w, b, dy):
    """y, dx, dw, db of PyTorch's linear in `dtype`."""
    x, w, b = (t.detach().to(dtype, copy=True).requires_grad_() for t in (x, w, b))
    y = F.linear(x, w, b)
    return y.detach(), *torch.autograd.grad(y, (x, w, b), dy.to(dtype))


@contextmanager
def no_tracker() -> Iterator[None]:
    """Run as in a process that never asked for a tracker; afterwards put back the one that there was."""
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


def drawn(seed: int, *counts: int, device: str = "cpu") -> list[torch.Tensor]:
    """Return what a generator seeded with `seed` draws, in pieces of these lengths."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.rand(count, generator=generator, device=device) for count in counts]
