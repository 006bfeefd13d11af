"""Loading of a model of transformers from a folder or the Hub, sharded: only the first rank ever holds all weights."""

import inspect
import os
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from megatron_ext.distributed.same_on_ranks import require_same
from megatron_ext.dtensor.decoder import import_transformers, tie_word_embeddings
from megatron_ext.dtensor.parallelize import parallelize, with_all_dims
from megatron_ext.dtensor.plans import CustomPlan
from megatron_ext.dtensor.pretrained.saving import Ranks


class ParallelizeOptions(TypedDict, total=False):
    """The keywords of `parallelize`, for completion and type checkers."""

    sequence_parallel: bool
    activation_checkpointing: bool
    cpu_offload: bool
    plan: CustomPlan
    expert_parallel: bool


def from_pretrained(
    name_or_path: str | os.PathLike,
    mesh: DeviceMesh,
    dtype: torch.dtype = torch.bfloat16,
    **options: Unpack[ParallelizeOptions],
) -> nn.Module:
    """Load a causal language model of transformers, sharded over `mesh`, in eval mode.

    The first rank of the world, which must be in the mesh, reads the files into its host memory, in float32; the other
    ranks get one weight after the other, and keep their pieces. Parameters are float32, for the optimizer.

    Args:
        name_or_path: a folder, or a name on the Hub, whose config each rank can read. Code in the folder is never run:
            load such a model yourself, and pass it to `parallelize`.
        mesh, dtype: as for `parallelize`.
        options: the other options of `parallelize`, by name.

    Communicates: a broadcast of each weight, and the small all-gathers by which ranks compare config and model.

    Raises:
        ImportError: transformers or accelerate is not installed.
        TypeError: there is no such option.
        ValueError: an argument that `parallelize` refuses; or another rank could not read, which itself raises OSError.
    """
    inspect.signature(parallelize).bind(None, mesh, dtype, **options)  # raises TypeError before files are read
    transformers, mesh = import_transformers(), with_all_dims(mesh)
    from accelerate import init_empty_weights

    config, fault, empty = None, None, nn.Module()
    whole: dict[str, Tensor] = {}
    auto = transformers.AutoModelForCausalLM
    try:
        if os.path.isabs(name_or_path) and not os.path.isdir(name_or_path):
            raise FileNotFoundError(f"name_or_path is {str(name_or_path)!r}: there is no such folder on this host")
        config = transformers.AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)
        with init_empty_weights():
            empty = auto.from_config(config).float()
        tie_word_embeddings(empty)
        if dist.get_rank() == 0:
            model = auto.from_pretrained(name_or_path, trust_remote_code=False).float()
            whole, empty.generation_config = model.state_dict(), model.generation_config
    except Exception as error:  # raised below, on the other ranks too
        fault = error
    ranks = Ranks.of([mesh])
    require_same("from_pretrained", {"the config": config and config.to_json_string()}, *ranks, fault)
    parallelize(empty, mesh, dtype, **options)
    load_whole(empty, whole, "cpu" if options.get("cpu_offload") else None)
    for module in empty.modules():  # buffers that no file has, such as the frequencies of rotary embeddings
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(ranks.device)
    return empty.train(False)


def load_whole(model: nn.Module, whole: dict[str, Tensor], device: str | None = None) -> None:
    """Give a sharded model, which may be on the meta device, the weights `whole` of rank 0; other ranks pass {}.

    `device`: the model's device afterwards; None: the device on which its ranks communicate. Communicates a broadcast
    of each weight over the world.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict[str, Any](whole), options=options)
    tie_word_embeddings(model)
    if device is not None:
        model.to(device)
