"""Hugging Face's Llama family as Megatron-Core's GPTModel: the config, and the weights both ways.

Legend: D hidden size, H query heads, G key heads, C channels of a head, F hidden size of the MLP, V vocabulary,
R tensor-parallel ranks. GPTModel keeps queries, keys and values of each key head together, `[G, (H/G + 2) C, D]`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

# transformers' model types; what tells them apart for us is a bias of q, k and v, and norms of q and k.
_MODEL_TYPES = ("llama", "qwen2", "qwen3")
Whole = Callable[[str], Tensor]


class Sizes(NamedTuple):
    """Of attention and MLP."""

    heads: int
    groups: int
    channels: int


def sizes(config: Any) -> Sizes:
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Sizes(config.num_attention_heads, config.num_key_value_heads, channels)


def check(config: Any, tp: int) -> None:
    """Raises ValueError unless GPTModel computes what transformers does with `config`, on `tp` ranks."""
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in _MODEL_TYPES:
        raise ValueError(
            f"model_name is a config of {kind}: Megatron's GPTModel is built for {', '.join(_MODEL_TYPES)}"
        )
    rope = rope_parameters(config)
    fixes = {
        "rope_type": rope.get("rope_type", "default") == "default",
        "hidden_act": config.hidden_act in ("silu", "swish"),
        "sliding window": not any("sliding" in kind for kind in getattr(config, "layer_types", None) or []),
        "attention_bias": kind == "qwen2" or not getattr(config, "attention_bias", False),
        "mlp_bias": not getattr(config, "mlp_bias", False),
    }
    if unfit := [name for name, fits in fixes.items() if not fits]:
        raise ValueError(f"the config's {', '.join(unfit)} is not the plain Llama's; use DTensorPolicyWorker")
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % tp:
            raise ValueError(
                f"{name} is {getattr(config, name)} with {tp} tensor-parallel ranks: it must divide by them; pad it, "
                f"or use fewer ranks"
            )


def rope_parameters(config: Any) -> Mapping[str, Any]:
    """transformers 5 has all of them in one dict, 4 the base beside it."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return {"rope_theta": getattr(config, "rope_theta", None), **found}


def transformer_arguments(config: Any) -> dict[str, Any]:
    """What Megatron's `TransformerConfig` needs to compute the same."""
    kind, (heads, groups, channels) = config.model_type, sizes(config)
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": channels,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind == "qwen2",
        "qk_layernorm": kind == "qwen3",
        "hidden_dropout": 0.0,
        "attention_dropout": config.attention_dropout,
    }


def gpt_arguments(config: Any) -> dict[str, Any]:
    """What `GPTModel` needs beside its config and layers."""
    return {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": rope_parameters(config)["rope_theta"],
    }


_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def _names(name: str) -> tuple[str, list[str]]:
    """For a name of GPTModel how its weight is made ("copy", "qkv", "gated"), and transformers' names of the parts."""
    if name in _TOP:
        return "copy", [_TOP[name]]
    _, _, layer, rest = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    if rest in _LAYER:
        return "copy", [prefix + _LAYER[rest]]
    kind = rest.rpartition(".")[2]
    if rest.startswith("self_attention.linear_qkv."):
        return "qkv", [f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv"]
    assert rest == "mlp.linear_fc1.weight", name
    return "gated", [f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")]


def from_transformers(name: str, state: Mapping[str, Tensor], size: Sizes) -> Tensor:
    """GPTModel's whole weight of this name, from transformers' state dict; a gated one is `[2, F, D]`."""
    kind, parts = _names(name)
    weights = [state[part] for part in parts]
    if kind == "copy":
        return weights[0]
    if kind == "gated":
        return torch.stack(weights)
    return torch.cat([x.view(size.groups, -1, *x.shape[1:]) for x in weights], 1).flatten(0, 1)


def to_transformers(
    shapes: Mapping[str, torch.Size], whole: Whole, size: Sizes
) -> Iterator[tuple[str, torch.Size, Callable[[], Tensor]]]:
    """transformers' names of all weights, their shapes, and functions that make them from GPTModel's whole ones."""

    def part_of(name: str, kind: str, i: int) -> Tensor:
        x = whole(name)
        if kind != "qkv":
            return x[i] if kind == "gated" else x
        split = [size.heads // size.groups * size.channels, size.channels, size.channels]
        return x.view(size.groups, sum(split), *x.shape[1:]).split(split, 1)[i].flatten(0, 1)

    for name, shape in shapes.items():
        kind, parts = _names(name)
        for i, part in enumerate(parts):
            found = shape[1:] if kind == "gated" else shape
            if kind == "qkv":
                found = torch.Size([(size.heads if i == 0 else size.groups) * size.channels, *shape[1:]])
            yield part, found, partial(part_of, name, kind, i)
