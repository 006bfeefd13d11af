"""Megatron's process groups for one run of an example: on GPUs over NCCL, or on the CPU over gloo."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from megatron_on_cpu import megatron_on_cpu

with warnings.catch_warnings():  # at import Megatron says, five times, that Apex and Transformer Engine are missing
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def ranks(*allowed: int) -> int:
    """How many ranks torchrun started; 1 without it. Ends the program where that is none of those `allowed`."""
    os.environ.update(_ALONE | os.environ)
    started = int(os.environ["WORLD_SIZE"])
    if allowed and started not in allowed:
        fitting = " or ".join(map(str, allowed))
        sys.exit(
            f"{sys.argv[0]}: started on {started} ranks, runs on {fitting}: torchrun --nproc-per-node {allowed[-1]}"
        )
    return started


def has_gpus() -> bool:
    """Whether this machine has a GPU for each of its ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= torch.cuda.device_count()


@contextmanager
def megatron_job(tensor: int = 1, pipeline: int = 1, *, on_gpu: bool | None = None) -> Iterator[None]:
    """`parallel_state` for these sizes; further ranks are data parallel. `on_gpu=None`: where there are enough GPUs."""
    ranks()
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning)  # what torch says of the functions that Megatron calls
    on_gpu = has_gpus() if on_gpu is None else on_gpu
    if on_gpu:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron wants kernels in the order it starts them
    with nullcontext() if on_gpu else megatron_on_cpu():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")
        parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        yield
        dist.destroy_process_group()
