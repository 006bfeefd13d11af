"""The facts of a head beside its weight, and what a layer that makes logits says of them: an `nn.Linear`, a DTensor,
Megatron-Core's output layer."""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.groups import UNSHARDED
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.adapters.lora import LoRA
from megatron_ext.head.adapters.peft_layers import unwrapped
from megatron_ext.head.validation.option_checks import Bits, Cache, rounds


class HeadFacts(TypedDict, total=False):
    """What `LmHead` takes by keyword, where it says more of each."""

    bias: Tensor | None
    vocab: VocabShard | None
    logit_scale: float
    softcap: float | None
    temperature: float
    cache: Cache
    chunk_tokens: int | None
    gradient_accumulation_fusion: bool
    bits: Bits | None
    logit_dtype: torch.dtype | None
    lora: LoRA | Sequence[LoRA] | None


def head_facts(layer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `LmHead`: what is given, and where that is None or missing what the layer says.

    A given weight stands for the layer's: the embedding's where they are tied, or one that was gathered. Raises as
    `LmHead.of`.
    """
    layer, adapters = unwrapped(layer)
    weight = layer if isinstance(layer, Tensor) else getattr(layer, "weight", None)
    weight = weight if given.get("weight") is None else given["weight"]
    if not isinstance(weight, Tensor):
        raise ValueError(
            f"layer is {type(layer).__name__} without a weight: it must be a tensor [V, D], or a layer that has one; "
            f"under weight tying pass weight=, the embedding's"
        )
    bias = None if isinstance(layer, Tensor) or getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
    lora = [each._replace(A=_local(each.A), B=_local(each.B)) for each in adapters] or None
    said: dict[str, Any] = {"weight": weight, "hidden_layout": "replicated", "lora": lora}
    if isinstance(weight, DTensor):
        said["weight"], said["tp_group"], said["vocab"] = local_shard(weight, 0)
    elif isinstance(layer, nn.Linear):
        said["tp_group"] = UNSHARDED
    elif hasattr(layer, "sequence_parallel"):
        said["tp_group"] = getattr(layer, "tp_group", None)
        said["hidden_layout"] = "sequence" if layer.sequence_parallel else "replicated"
        said["softcap"] = getattr(layer, "softcap", None)
        made = getattr(layer, "output_dtype", None)  # Megatron's `logit_dtype`, since 0.20
        said["logit_dtype"] = made if rounds(made) else None
        said["gradient_accumulation_fusion"] = bool(getattr(layer, "gradient_accumulation_fusion", False))
    if isinstance(bias, Tensor):
        said["bias"] = _local(bias)
    return said | {name: value for name, value in given.items() if value is not None}


def _local(x: Tensor) -> Tensor:
    return local_shard(x, 0)[0] if isinstance(x, DTensor) else x


def local_shard(x: Tensor, dim: int) -> tuple[Tensor, Any, VocabShard]:
    """This rank's shard of `x`, the group that shares its vocabulary (dim `dim`), and which columns these are.

    Raises:
        ValueError: a DTensor that is cut along the vocabulary over a mesh of more than one dim.
    """
    size = x.shape[dim]
    if not isinstance(x, DTensor) or not x.placements[-1].is_shard(dim % x.dim()):
        local = x.to_local() if isinstance(x, DTensor) else x
        return local, UNSHARDED, VocabShard(0, size, size)
    if x.device_mesh.ndim != 1:
        raise ValueError(
            f"a DTensor on mesh {x.device_mesh}: its mesh must be 1-D, the tensor-parallel ranks; pass a shard"
        )
    group = x.device_mesh.get_group()
    return x.to_local(), group, VocabShard.chunk(size, group)
