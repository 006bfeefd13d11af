"""PEFT's layers in the place of a linear layer: LoRA beside it, or a copy that trains. PEFT is not imported.

PEFT's LoRA layer has `base_layer`, and under the name of each adapter `lora_A`, `lora_B`, `scaling` and `lora_dropout`.
"""

from typing import Any

from megatron_ext.head.adapters.lora import LoRA


def unwrapped(layer: Any) -> tuple[Any, list[LoRA]]:
    """The layer that makes logits, and the adapters that are on; `layer` itself where nothing stands in its place.

    Raises:
        ValueError: adapters that are more than a low-rank product (DoRA, LoHa, IA3, new tokens), or not PEFT's.
    """
    off = getattr(layer, "disable_adapters", False)
    if hasattr(layer, "original_module") and hasattr(layer, "modules_to_save"):
        names = [] if off else [name for name in layer.active_adapters if name in layer.modules_to_save]
        return (layer.modules_to_save[names[0]] if names else layer.original_module), []
    if not any(hasattr(layer, name) for name in ("base_layer", "original_module", "to_wrap")):
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
