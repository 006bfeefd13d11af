"""Megatron's process groups for one run of an example, and the parts of the examples' small models."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from program import has_gpus, ranks
from torch import Tensor

from megatron_on_cpu import megatron_on_cpu

with warnings.catch_warnings():  # at import Megatron says, five times, that Apex and Transformer Engine are missing
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig


@contextmanager
def process_group(on_gpu: bool | None = None) -> Iterator[None]:
    """Initialise torch.distributed over NCCL, or on the CPU over gloo; `on_gpu=None`: NCCL if each rank has a GPU."""
    ranks()
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's warnings of functions that Megatron calls
    on_gpu = has_gpus() if on_gpu is None else on_gpu
    if on_gpu:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron relies on kernels that run in launch order
    with nullcontext() if on_gpu else megatron_on_cpu():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")
        yield
        dist.destroy_process_group()


@contextmanager
def megatron_job(tensor: int = 1, pipeline: int = 1, *, on_gpu: bool | None = None) -> Iterator[None]:
    """Initialise `parallel_state` for these sizes in a process group; the other dimension is data parallel."""
    with process_group(on_gpu):
        parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        yield


def run_schedule(model: torch.nn.Module, forward_step: Callable, batches: Sequence, sizes: tuple[int, int]) -> Tensor:
    """Run Megatron's schedule over the micro-batches, forward and backward; return their mean loss on every stage.

    `sizes` are the positions and sequences of a micro-batch.
    """
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=sizes[0],
        micro_batch_size=sizes[1],
        forward_only=False,
    )
    mean = torch.stack(losses).mean() if losses else torch.zeros((), device=torch.cuda.current_device())
    dist.all_reduce(mean, group=parallel_state.get_pipeline_model_parallel_group())  # stages before the last add 0
    return mean


def mean_loss(per_token: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce a micro-batch's losses for Megatron's schedules: return the mean to differentiate, and one to report."""
    mean = per_token.mean()
    return mean, mean.detach().clone()  # the schedule divides the first in place


def print_steps(digits: int = 5, **losses: list[float]) -> None:
    """Print a line with the losses of several runs for each step, on the first rank."""
    for step, values in enumerate(zip(*losses.values(), strict=True) if dist.get_rank() == 0 else ()):
        print(f"step {step}", *(f"{run} {loss:.{digits}f}" for run, loss in zip(losses, values, strict=True)), sep="  ")


def small_config(**settings: Any) -> TransformerConfig:
    """Configure a GPT that has the same weights at every tensor-parallel size, and needs no kernels of Apex or CUDA."""
    without = ("gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm")
    own: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "use_cpu_initialization": True}
    own |= dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0) | dict.fromkeys(without, False)
    own["tensor_model_parallel_size"] = parallel_state.get_tensor_model_parallel_world_size()
    return TransformerConfig(**own | settings)


def gpt_stage(config: TransformerConfig, vocab: int, positions: int, layers: Any = None, **options: Any) -> GPTModel:
    """Make this pipeline stage's part of a GPT with rotary embeddings; `layers` None: Megatron's local layers."""
    options["pre_process"] = parallel_state.is_pipeline_first_stage()
    options["post_process"] = parallel_state.is_pipeline_last_stage()
    gpt = GPTModel(
        config, layers or get_gpt_layer_local_spec(), vocab, positions, position_embedding_type="rope", **options
    )
    return gpt.to(torch.cuda.current_device())


def adam(model: torch.nn.Module, distributed: bool = True) -> MegatronOptimizer:
    """Make Megatron's Adam for a model that is wrapped by Megatron's DDP or FSDP2."""
    settings = OptimizerConfig(lr=1e-3, use_distributed_optimizer=distributed)
    return get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
