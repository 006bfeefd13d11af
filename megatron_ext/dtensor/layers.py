"""Layers of a transformers model, recognised by their modules and parameters, and the plan that follows.

If any parameter is not accounted for, the layer is `Unknown`: the model then keeps transformers' own plan and
attention. All plans follow Megatron's pattern (Shoeybi et al., 2019; sequence parallelism: Korthikanti et al., 2022):
q, k, v, gate and up sharded by output, o and down by input. With sequence parallelism the residual stream and its norms
are sharded along dim 1 of `[B, S, D]`, and each block gathers its tokens once.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from megatron_ext.dtensor.decoder import text_model
from megatron_ext.dtensor.experts import ExpertsByColumn, ExpertsByExpert, are_stacked, column_layout
from megatron_ext.dtensor.piecewise import Cut, adds_up, heads_add_up
from megatron_ext.dtensor.styles import (
    AttentionHeads,
    FusedColwise,
    ShardedNorm,
    ShardwiseModule,
    WholeTokens,
)

Plan = dict[str, ParallelStyle]


class Unknown(Exception):
    """A part of a model that is not understood; the message names it."""


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel layout that a caller asks for.

    Attributes:
        tp, cp: tensor- and context-parallel ranks.
        sequence_parallel: shard the residual stream over the tensor-parallel ranks too.
        expert_parallel: give each tensor-parallel rank whole experts, instead of a piece of every one.
    """

    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    expert_parallel: bool = False

    @property
    def stream(self) -> Placement:
        """Return the placement of the residual stream `[B, S, D]` on the tensor-parallel ranks."""
        return Shard(1) if self.sequence_parallel and self.tp > 1 else Replicate()


_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_masks_for_generate")
_VISION_MASKS = {"create_masks_for_vision_model"}  # masks for tokens of images, which are refused
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SPLIT = ({"gate_proj", "up_proj", "down_proj"}, {"up_proj", "down_proj"}, {"c_fc", "c_proj"}, {"w1", "w2", "w3"})
_ROWWISE = ("down_proj", "c_proj", "w2")
_LATENT = {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"}


def check_attention(model: nn.Module) -> None:
    """Raise Unknown unless every layer of `model` attends causally, with or without a window, by transformers'
    attention interface. Functions of transformers are recognised by identity, not by name."""
    text = text_model(model)
    config, module = text.config, sys.modules[type(text).__module__]
    known = [getattr(sys.modules.get("transformers.masking_utils"), name, None) for name in _MASKS]
    masks = {name: make for name, make in vars(module).items() if name.startswith("create_") and "mask" in name}
    if odd := {name for name, make in masks.items() if make not in known} - _VISION_MASKS:
        raise Unknown(f"masks made by {', '.join(sorted(odd))}")
    if odd := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        raise Unknown(f"layers of type {', '.join(sorted(odd))}")
    if getattr(config, "attention_chunk_size", None):
        raise Unknown("attention in chunks")
    if not getattr(config, "is_causal", True):
        raise Unknown("attention in both directions, as config.is_causal=False says,")
    if not takes_attention_functions(model):
        raise Unknown("attention outside of transformers' attention interface")
    for layer in text.layers:
        attention = getattr(layer, "self_attn", None)
        if attention is None or not getattr(attention, "is_causal", False):
            raise Unknown("a layer without causal self_attn")
        if not _is_latent(attention):
            _heads(attention)


def check_draws(model: nn.Module, heads_are_cut: bool) -> None:
    """Raise ValueError if training `model` draws random numbers for activations that tensor-parallel ranks share.

    `heads_are_cut`: each rank attends with heads of its own, for which it may draw.
    """
    text: Any = text_model(model)
    for name, value in text.config.to_dict().items():
        if "classifier" in name or not ("drop" in name or "jitter" in name):
            continue
        of_heads = name in ("attention_dropout", "attn_pdrop") and heads_are_cut
        if not of_heads and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            raise ValueError(
                f"{name} is {value}: tensor-parallel ranks would draw different numbers for what they all hold; set it "
                f"to 0 in the model's config"
            )


def takes_attention_functions(model: nn.Module) -> bool:
    """Return whether `model` attends by transformers' attention interface; older forwards do it themselves."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = sys.modules[type(text_model(model)).__module__]
    return getattr(module, "ALL_ATTENTION_FUNCTIONS", None) is ALL_ATTENTION_FUNCTIONS


def model_plan(model: nn.Module, layout: ParallelSizes) -> Plan:
    """Return the plan of the layers and the last norm of `model`'s text decoder, with names relative to the decoder.

    Raises Unknown for a part that is not understood, ValueError for sizes that do not divide by the ranks.
    """
    text = text_model(model)
    for name, child in text.named_children():
        if name not in ("embed_tokens", "layers", "norm") and _has_parameters(child):
            raise Unknown(f"{name} beside the layers")
    plan: Plan = {}
    if isinstance(norm := _stream_norm("norm", text.norm, text, layout), ParallelStyle):
        plan["norm"] = norm
    for i, layer in enumerate(text.layers):
        for name, style in _layer(layer, text, layout).items():
            plan[f"layers.{i}.{name}"] = style
    return plan


def _layer(layer: nn.Module, text: Any, layout: ParallelSizes) -> Plan:
    if odd := [name for name, _ in layer.named_parameters(recurse=False)]:
        raise Unknown(f"{', '.join(odd)} in a layer")
    plan: Plan = {}
    for name, child in layer.named_children():
        if not _has_parameters(child):
            continue
        if name == "self_attn":
            found = _attention(child, layout)
        elif name in ("mlp", "feed_forward", "block_sparse_moe"):
            found = _feed_forward(child, layout)
        else:
            style = _stream_norm(name, child, text, layout)
            found = {} if style is None else {"": style}
        plan.update({f"{name}.{inner}" if inner else name: style for inner, style in found.items()})
    return plan


def _stream_norm(name: str, module: nn.Module, text: Any, layout: ParallelSizes) -> ParallelStyle | None:
    """Return the style of a norm on the residual stream, whose parameters have the hidden size; None: none needed."""
    hidden = text.embed_tokens.weight.shape[1:]
    if "Norm" not in type(module).__name__ or any(p.shape != hidden for p in module.parameters()):
        raise Unknown(f"{name}, a {type(module).__name__}, in a layer")
    sliced = layout.stream != Replicate() and _has_parameters(module)
    return SequenceParallel(use_local_output=True) if sliced else None


def _attention(attention: Any, layout: ParallelSizes) -> Plan:
    if _is_latent(attention):
        return {"": WholeTokens(layout.stream, local=True)}
    heads, groups, size = _heads(attention)
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", groups)):
        if count % layout.tp:
            raise ValueError(
                f"{name} is {count}: it must be a multiple of the {layout.tp} tensor-parallel ranks; use a smaller "
                f"tensor-parallel size"
            )
    own = [name for name, _ in attention.named_parameters(recurse=False)]
    plan: Plan = {"": AttentionHeads(layout.stream, own), "o_proj": RowwiseParallel(output_layouts=layout.stream)}
    if hasattr(attention, "qkv_proj"):
        plan["qkv_proj"] = FusedColwise((heads * size, groups * size, groups * size))
    else:
        plan.update({name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")})
    for name, count in (("q_norm", heads), ("k_norm", groups)):
        norm = getattr(attention, name, None)
        if norm is not None and _has_parameters(norm):
            plan[name] = _head_norm(name, norm, count, size)
    return plan


def _head_norm(name: str, norm: nn.Module, heads: int, size: int) -> ParallelStyle:
    shapes = {tuple(p.shape) for p in norm.parameters()}
    if shapes == {(size,)}:  # each rank norms its own heads with one shared weight, whose gradient is summed over ranks
        return SequenceParallel(sequence_dim=1, use_local_output=True)
    if shapes == {(heads * size,)}:
        return ShardedNorm(-1)
    if shapes == {(heads, size)}:
        return ShardedNorm(2)
    raise Unknown(f"{name} with weights of shape {sorted(shapes)}")


def _is_latent(attention: nn.Module) -> bool:
    """Return whether this is multi-head latent attention (DeepSeek-V2), which stays whole, as in transformers' plan."""
    names = {name for name, child in attention.named_children() if _has_parameters(child)}
    return "kv_b_proj" in names and names <= _LATENT | {"o_proj"} and not _own_parameters(attention)


def _heads(attention: Any) -> tuple[int, int, int]:
    """Count query heads, key/value heads, and channels of a head; raises Unknown unless all parameters fit these."""
    kind = type(attention).__name__
    names = {name for name, child in attention.named_children() if _has_parameters(child)} - {"q_norm", "k_norm"}
    if odd := _own_parameters(attention) - {"sinks"}:
        raise Unknown(f"{', '.join(sorted(odd))} in {kind}")
    _require_weights(attention, names)
    size = getattr(attention, "head_dim", None)
    if not isinstance(size, int):
        raise Unknown(f"{kind} without head_dim")
    config = attention.config
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    groups = heads if groups is None else groups
    if names == {"q_proj", "k_proj", "v_proj", "o_proj"}:
        found = {name: getattr(attention, name).weight.shape[0] for name in ("q_proj", "k_proj", "v_proj")}
        if found != {"q_proj": heads * size, "k_proj": groups * size, "v_proj": groups * size}:
            raise Unknown(f"{kind} with projections of sizes {found}")
    elif names == {"qkv_proj", "o_proj"}:
        if not heads_add_up(attention, heads // groups, size):
            raise Unknown(f"{kind}, which cuts its qkv_proj in a way")
        if attention.qkv_proj.weight.shape[0] != (heads + 2 * groups) * size:
            raise Unknown(f"{kind} with a qkv_proj of size {attention.qkv_proj.weight.shape[0]}")
    else:
        raise Unknown(f"{kind} of {', '.join(sorted(names))}")
    if attention.o_proj.weight.shape[1] != heads * size:
        raise Unknown(f"{kind} with an o_proj of {attention.o_proj.weight.shape[1]} inputs")
    return heads, groups, size


def _feed_forward(block: nn.Module, layout: ParallelSizes) -> Plan:
    if not hasattr(block, "experts"):
        plan = _mlp(block, layout, layout.stream)
        return {"": WholeTokens(layout.stream), **plan}
    # A mixture: except in its experts, the block computes on all tokens, the same on every rank.
    plan = {"": WholeTokens(layout.stream, local=True)}
    for name, child in block.named_children():
        if name == "experts":
            plan.update(_experts(child, layout))
        elif name.startswith("shared") and any(True for _ in child.children()):
            plan.update({f"{name}.{inner}": style for inner, style in _mlp(child, layout, Replicate()).items()})
    return plan


def _experts(experts: Any, layout: ParallelSizes) -> Plan:
    if are_stacked(experts):
        if layout.expert_parallel:
            if experts.num_experts % layout.tp:
                raise ValueError(
                    f"the model has {experts.num_experts} experts: they must be a multiple of the {layout.tp} "
                    f"tensor-parallel ranks that share them; set expert_parallel_size to 1"
                )
            return {"experts": ExpertsByExpert()}
        if layout.tp > 1 and (reason := column_layout(experts, layout.tp)):
            raise ValueError(f"tensor parallelism cannot cut this model: {reason}")
        return {"experts": ExpertsByColumn()}
    if not isinstance(experts, nn.ModuleList):
        raise Unknown(f"experts in a {type(experts).__name__}")
    if layout.expert_parallel:
        raise ValueError(
            "expert parallelism needs all experts of a layer in one parameter, as transformers has them from 5.0 on; "
            "install transformers 5, or set expert_parallel_size to 1"
        )
    return {
        f"experts.{i}.{name}": style
        for i, expert in enumerate(experts)
        for name, style in _mlp(expert, layout, Replicate()).items()
    }


def _mlp(mlp: Any, layout: ParallelSizes, output: Placement) -> Plan:
    kind = type(mlp).__name__
    # In the module's order, the same on every rank: torch scatters weights in the order of the plan.
    names = [name for name, child in mlp.named_children() if _has_parameters(child)]
    activations = scalar_functions(mlp)
    linears = [name for name in names if name not in activations]
    if _own_parameters(mlp) or (set(linears) != {"gate_up_proj", "down_proj"} and set(linears) not in _SPLIT):
        raise Unknown(f"{kind} of {', '.join(sorted({*names} | _own_parameters(mlp)))}")
    _require_weights(mlp, linears)
    row = [name for name in linears if name in _ROWWISE]
    column = [name for name in linears if name not in row]
    fused = [name for name in column if name == "gate_up_proj"]
    if all(type(mlp.get_submodule(name)) is nn.Linear for name in linears):  # torch cuts no other class
        added = adds_up(mlp, Cut(column, row, fused))
        if added is False or (added is None and (fused or activations)):
            raise Unknown(f"{kind}, whose pieces do not add up to the whole,")
    styles: dict[str, ParallelStyle] = {name: ShardwiseModule() for name in activations}
    styles |= {name: RowwiseParallel(output_layouts=output) for name in row}
    styles |= {name: ColwiseParallel() for name in column}
    if fused:
        size = mlp.gate_up_proj.weight.shape[0] // 2
        if size % layout.tp:
            raise ValueError(
                f"intermediate_size is {size}: it must be a multiple of the {layout.tp} tensor-parallel ranks, as "
                f"gate and up are one weight; use a smaller tensor-parallel size"
            )
        styles["gate_up_proj"] = FusedColwise((size, size))
    return {name: styles[name] for name in names}


def scalar_functions(block: nn.Module) -> list[str]:
    """List the children of `block` whose parameters are all single numbers, as in activation functions (xIELU)."""
    return [
        name
        for name, child in block.named_children()
        if _has_parameters(child) and all(p.numel() == 1 for p in child.parameters())
    ]


def _require_weights(block: nn.Module, names: Iterable[str]) -> None:
    for name in sorted(names):
        if not hasattr(child := block.get_submodule(name), "weight"):
            raise Unknown(f"{name}, a {type(child).__name__} without a weight, in {type(block).__name__}")


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _own_parameters(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(recurse=False)}
