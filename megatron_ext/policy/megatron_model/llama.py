"""Hugging Face's Llama family, with or without experts, as Megatron-Core's GPTModel: config, and weights both ways.

Legend: D hidden size, H query heads, G key heads, C channels of a head, F hidden size of the MLP, E experts,
V vocabulary, R tensor-parallel ranks. transformers 5 keeps the experts of a layer in two tensors, 4 each expert in
three. GPTModel keeps queries, keys and values of each key head together, `[G, (H/G + 2) C, D]`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

# transformers' model types; they differ in a bias of q, k and v, in norms of q and k, and in experts.
_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
Whole = Callable[[str], Tensor]


class ModelSizes(NamedTuple):
    """Numbers of query heads, of key heads, of channels of a head, and of experts of a layer."""

    heads: int
    groups: int
    channels: int
    experts: int = 0


def sizes(config: Any) -> ModelSizes:
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelSizes(config.num_attention_heads, config.num_key_value_heads, channels, experts(config))


def experts(config: Any) -> int:
    """Count the experts of a layer that has any; 0 for a model without."""
    if config.model_type not in ("mixtral", "qwen3_moe"):
        return 0
    return getattr(config, "num_local_experts", None) or config.num_experts


def check(config: Any, tp: int, stages: int = 1, ep: int = 1) -> None:
    """Raise ValueError unless GPTModel computes what transformers does with `config`, cut over `tp` ranks, `stages`
    pipeline stages (virtual ones count), and `ep` expert-parallel ranks."""
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in _MODEL_TYPES:
        raise ValueError(
            f"model_name is a config of {kind}: Megatron's GPTModel is built for {', '.join(_MODEL_TYPES)}"
        )
    rope = rope_parameters(config)
    fixes = {
        "rope_type": rope.get("rope_type", "default") == "default",
        "hidden_act": config.hidden_act in ("silu", "swish"),
        "sliding window": not any("sliding" in kind for kind in getattr(config, "layer_types", None) or [])
        and not (kind == "mixtral" and config.sliding_window)
        and not getattr(config, "use_sliding_window", False),
        "router_jitter_noise": not getattr(config, "router_jitter_noise", 0.0),
        "is_causal": getattr(config, "is_causal", True),
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
    if config.num_hidden_layers % stages:
        raise ValueError(
            f"num_hidden_layers is {config.num_hidden_layers} and the pipeline has {stages} stages, virtual ones "
            f"counted: it must divide by them; change the stages, or say what the first and the last one have by "
            f"num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        )
    if ep > 1 and (not experts(config) or experts(config) % ep):
        raise ValueError(
            f"expert_model_parallel_size is {ep} and the model has {experts(config)} experts a layer: they must divide "
            f"by it; set it to 1, or to a divisor"
        )


def rope_parameters(config: Any) -> Mapping[str, Any]:
    """Return RoPE's parameters with `rope_theta`, which transformers 4 keeps beside the others."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return {"rope_theta": getattr(config, "rope_theta", None), **found}


def transformer_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments with which Megatron's `TransformerConfig` computes the same."""
    kind, (heads, groups, channels, count) = config.model_type, sizes(config)
    return {
        **(_experts_arguments(config, count) if count else {}),
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
        "qk_layernorm": kind in ("qwen3", "qwen3_moe"),
        "hidden_dropout": 0.0,
        "attention_dropout": config.attention_dropout,
    }


def _experts_arguments(config: Any, count: int) -> dict[str, Any]:
    """Return the arguments of experts, without a load-balancing loss, which transformers leaves to its callers too."""
    dense = set(getattr(config, "mlp_only_layers", None) or [])
    step = getattr(config, "decoder_sparse_step", 1)
    return {
        "num_moe_experts": count,
        "moe_layer_freq": [
            int(layer not in dense and (layer + 1) % step == 0) for layer in range(config.num_hidden_layers)
        ],
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        # False: the weights of the chosen experts sum to 1, as Mixtral's always do.
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
    }


def gpt_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments that `GPTModel` needs beside its config and layers."""
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
    "mlp.router.weight": "mlp.gate.weight",
}
_EXPERTS = "mlp.experts.local_experts."
_HF_EXPERTS = ".mlp.experts."


def _names(name: str) -> tuple[str, list[str]]:
    """Tell how GPTModel's weight `name` is made ("copy", "qkv", "gated"), and transformers' names of its parts."""
    if name in _TOP:
        return "copy", [_TOP[name]]
    _, _, layer, rest = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    if rest in _LAYER:
        return "copy", [prefix + _LAYER[rest]]
    kind = rest.rpartition(".")[2]
    if rest.startswith("self_attention.linear_qkv."):
        return "qkv", [f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv"]
    if rest.startswith(_EXPERTS):
        expert, _, which = rest.removeprefix(_EXPERTS).partition(".")
        prefix += f"mlp.experts.{expert}."
        if which == "linear_fc2.weight":
            return "copy", [f"{prefix}down_proj.weight"]
        return "gated", [f"{prefix}{part}_proj.weight" for part in ("gate", "up")]
    assert rest == "mlp.linear_fc1.weight", name
    return "gated", [f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")]


def from_transformers(name: str, state: Mapping[str, Tensor], size: ModelSizes) -> Tensor:
    """Make GPTModel's whole weight of this name from transformers' state dict; a gated one is `[2, F, D]`."""
    kind, parts = _names(name)
    weights = [_of_state(part, state) for part in parts]
    if kind == "copy":
        return weights[0]
    if kind == "gated":
        return torch.stack(weights)
    return torch.cat([x.view(size.groups, -1, *x.shape[1:]) for x in weights], 1).flatten(0, 1)


def _of_state(name: str, state: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of this name; an expert's may be a slice of the tensor that holds all experts of a layer."""
    before, _, rest = name.partition(_HF_EXPERTS)
    if name in state or not rest:
        return state[name]
    expert, which, _ = rest.split(".")
    if which == "down_proj":
        return state[before + _HF_EXPERTS + "down_proj"][int(expert)]
    return state[before + _HF_EXPERTS + "gate_up_proj"][int(expert)].chunk(2)[which == "up_proj"]


def experts_together(state: Iterable[str]) -> bool:
    """Return whether transformers keeps a layer's experts in two tensors, by the names of the weights."""
    names = list(state)
    if any(".block_sparse_moe." in name for name in names):
        raise ValueError("Mixtral on Megatron needs transformers 5, whose names its weights get; upgrade transformers")
    return any(name.endswith(_HF_EXPERTS + "gate_up_proj") for name in names)


def to_transformers(
    shapes: Mapping[str, torch.Size], whole: Whole, size: ModelSizes, together: bool = False
) -> Iterator[tuple[str, torch.Size, Callable[[], Tensor]]]:
    """Yield each weight's name in transformers, its shape, and a function that makes it of GPTModel's whole weights.

    `together`: the experts of a layer in two tensors, `[E, 2F, D]` and `[E, D, F]`; else each expert by itself.
    `shapes` must have the experts of a layer in their order.
    """

    def part_of(name: str, kind: str, i: int) -> Tensor:
        x = whole(name)
        if kind != "qkv":
            return x[i] if kind == "gated" else x
        split = [size.heads // size.groups * size.channels, size.channels, size.channels]
        return x.view(size.groups, sum(split), *x.shape[1:]).split(split, 1)[i].flatten(0, 1)

    def of_all_experts(name: str) -> Tensor:
        before, after = name.split(_EXPERTS + "0")
        return torch.stack([whole(f"{before}{_EXPERTS}{i}{after}").flatten(0, -2) for i in range(size.experts)])

    for name, shape in shapes.items():
        kind, parts = _names(name)
        if together and _EXPERTS in name:
            if _EXPERTS + "0." in name:
                which = "gate_up_proj" if kind == "gated" else "down_proj"
                found = torch.Size([size.experts, shape[:-1].numel(), shape[-1]])
                yield parts[0].partition(_HF_EXPERTS)[0] + _HF_EXPERTS + which, found, partial(of_all_experts, name)
            continue
        for i, part in enumerate(parts):
            found = shape[1:] if kind == "gated" else shape
            if kind == "qkv":
                found = torch.Size([(size.heads if i == 0 else size.groups) * size.channels, *shape[1:]])
            yield part, found, partial(part_of, name, kind, i)
