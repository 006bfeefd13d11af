"""The arguments of `LmHead` that follow from a layer: an `nn.Linear`, a DTensor, Megatron-Core's output layer, or
PEFT's layer around one of these, with LoRA adapters or a copy that it trains.

PEFT is not imported. Its LoRA layer has `base_layer`, and under the name of each adapter `lora_A`, `lora_B`, `scaling`
and `lora_dropout`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.groups import UNSHARDED, VocabShard
from megatron_ext.head.checks import Bits, Cache, rounds
from megatron_ext.head.lora import LoRA

# The modules that define the forward of Megatron-Core's column-parallel layer, and of ours.
_COLUMN_PARALLEL = ("megatron.core.tensor_parallel.layers", "megatron_ext.tensor_parallel._layers.column_parallel")


class HeadFacts(TypedDict, total=False):
    """Keyword arguments of `LmHead`, whose docstring describes each."""

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
    fused_epilogue: bool
    sm_margin: int


def head_facts(layer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LmHead`: those `given`, and where one is None or missing, that of the layer.

    A given weight takes the place of the layer's: a tied embedding's, or one that was gathered. Raises as `LmHead.of`.
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


def check_forward(layer: nn.Module) -> None:
    """Raise ValueError for a layer whose forward may do more than multiply by its weight and add its bias. The forwards
    of torch, Megatron-Core and this package do not, nor that of a layer of Megatron's protocol with `softcap`."""
    inside = unwrapped(layer)[0]
    if not hasattr(inside, "weight") or (hasattr(inside, "sequence_parallel") and hasattr(inside, "softcap")):
        return
    forward = type(inside).forward
    home = getattr(forward, "__globals__", {}).get("__name__")  # a decorator does not copy `__globals__`
    known = forward in (nn.Linear.forward, nn.Embedding.forward) or home in _COLUMN_PARALLEL
    if "forward" in vars(inside) or not known:
        raise ValueError(
            f"layer is {type(inside).__name__} with a forward of its own, of which the head would leave out what is no "
            f"product with the weight: pass layer.weight, and by their names what else the head has of bias, "
            f"logit_scale, softcap, tp_group and hidden_layout"
        )


def with_options(head: Any, given: Mapping[str, Any], by: str, of: str) -> Any:
    """Return `head`, a dataclass, with the options of `given` that are not None.

    `by`, `of`: for the message, who gave the options, and whose head it is.

    Raises:
        ValueError: the head has another value of an option, which is not the default.
    """
    usual = {field.name: field.default for field in fields(head)}
    found = {}
    for name, value in given.items():
        own = getattr(head, name)
        if value is None or _is_same(value, own):
            continue
        if not _is_same(own, usual[name]):
            raise ValueError(
                f"{name} is {value!r} of {by} and {own!r} of {of}: they must be equal; leave it out in one of the two"
            )
        found[name] = value
    return replace(head, **found) if found else head


def _is_same(one: Any, other: Any) -> bool:
    """Compare two values of an option; groups are equal if they have the same ranks, and True is not 1."""
    if isinstance(one, ProcessGroup) and isinstance(other, ProcessGroup):
        return dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)
    return one is other or (isinstance(one, bool) is isinstance(other, bool) and bool(one == other))


def _local(x: Tensor) -> Tensor:
    return local_shard(x, 0)[0] if isinstance(x, DTensor) else x


def local_shard(x: Tensor, dim: int) -> tuple[Tensor, Any, VocabShard]:
    """Return this rank's shard of `x`, the group that shares the vocabulary (dim `dim`), and the shard's columns.

    Raises:
        ValueError: `x` is a DTensor that is sharded along the vocabulary over a mesh of more than one dim.
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


def unwrapped(layer: Any) -> tuple[Any, list[LoRA]]:
    """Return the layer that makes logits, and its active adapters: without PEFT `layer` itself and none. A module that
    torch.compile made is replaced by the layer inside.

    Raises:
        ValueError: adapters are more than a low-rank product (DoRA, LoHa, IA3, new tokens), or not PEFT's; or they are
            disabled and still merged.
    """
    layer = getattr(layer, "_modules", {}).get("_orig_mod", layer)
    off = getattr(layer, "disable_adapters", False)
    if hasattr(layer, "original_module") and hasattr(layer, "modules_to_save"):
        names = [] if off else [name for name in layer.active_adapters if name in layer.modules_to_save]
        return (layer.modules_to_save[names[0]] if names else layer.original_module), []
    if not (hasattr(layer, "base_layer") or hasattr(layer, "original_module") or hasattr(layer, "to_wrap")):
        return layer, []
    if not all(hasattr(layer, name) for name in ("base_layer", "lora_A", "lora_B", "scaling", "lora_dropout")):
        raise ValueError(
            f"the lm head is a {type(layer).__name__}: of layers that wrap another only PEFT's LoRA is known here; "
            f"leave the lm head out of the adapter's target modules, or merge the adapter into the weight"
        )
    if off and layer.merged:
        raise ValueError(
            "the adapters of the lm head are disabled and still merged into its weight: unmerge them first"
        )
    if off or layer.merged:
        return layer.base_layer, []
    return layer.base_layer, [_adapter(layer, name) for name in layer.active_adapters if name in layer.lora_A]


def _adapter(layer: Any, name: str) -> LoRA:
    if name in getattr(layer, "lora_variant", {}):
        variant = type(layer.lora_variant[name]).__name__
        raise ValueError(
            f"the adapter {name!r} of the lm head is {variant}: it is more than a low-rank product (DoRA, for one, "
            f"scales the rows of the merged weight); use LoRA without use_dora and the like on the lm head"
        )
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    if getattr(up, "bias", None) is not None or getattr(layer, "fan_in_fan_out", False):
        raise ValueError(
            f"the adapter {name!r} of the lm head has a bias of its own, or a transposed weight: neither is known "
            f"here; use lora_bias=False, on an nn.Linear"
        )
    probability = float(getattr(dropout, "p", 0.0)) if dropout.training else 0.0
    return LoRA(down.weight, up.weight, float(layer.scaling[name]), probability)
