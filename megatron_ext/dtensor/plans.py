"""Tensor-parallel plans: which module of a model is sharded how.

All plans follow one pattern, Megatron's (Shoeybi et al., 2019; sequence parallelism: Korthikanti et al., 2022):
embedding and lm head by vocabulary, q, k, v, gate and up by output, o and down by input. With sequence parallelism the
residual stream and the norms on it are sharded along dim 1 of `[B, S, D]`.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from megatron_ext.dtensor.decoder import output_head_path, text_model, text_model_path

Plan = dict[str, ParallelStyle]


class RotaryEmbedParallel(ParallelStyle):
    """A rotary embedding as it is: for plans written for NeMo-RL, which name this style.

    Of a sharded residual stream the module takes no more than dtype and device, and positions are those of the whole
    sequence; so nothing has to be prepared.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False):
        super().__init__()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


@dataclass(frozen=True)
class Family:
    """What models of one kind have beside the common pattern.

    Attributes:
        norms: norms of a layer on the residual stream, beside `input_layernorm`.
        heads_dim: where q_norm and k_norm, if there are any, find the heads in their input.
    """

    norms: tuple[str, ...] = ("post_attention_layernorm",)
    heads_dim: int = 2


LLAMA = Family()
QWEN = Family()
GEMMA3 = Family(
    norms=("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"), heads_dim=1
)


def family_plan(model: nn.Module, family: Family, sequence_parallel: bool) -> Plan:
    """The plan of a model of `family`, its keys the names of the model's modules."""
    stream = Shard(1) if sequence_parallel else Replicate()
    text, head = text_model_path(model), output_head_path(model)
    prefix = f"{text}." if text else ""
    layer = f"{prefix}layers.*."
    plan: Plan = {f"{prefix}embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[layer + name] = ColwiseParallel(input_layouts=stream)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[layer + name] = RowwiseParallel(output_layouts=stream)
    if hasattr(text_model(model).layers[0].self_attn, "q_norm"):
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            # Each rank norms its own heads: the weight is one, its gradient the sum over ranks.
            plan[layer + name] = SequenceParallel(sequence_dim=family.heads_dim, use_local_output=True)
    if sequence_parallel:
        # Attention takes the length of its sequence from its input, which must thus know the global shape.
        plan[f"{layer}input_layernorm"] = SequenceParallel()
        for name in family.norms:
            plan[layer + name] = SequenceParallel(use_local_output=True)
        plan[f"{prefix}norm"] = SequenceParallel(use_local_output=True)
    plan[head] = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    return plan


def check_heads(model: nn.Module, ranks: int) -> None:
    """Raises ValueError unless the attention heads of `model` divide by `ranks`."""
    config = text_model(model).config
    for name in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config, name) % ranks:
            raise ValueError(
                f"{name} is {getattr(config, name)}: it must be a multiple of the {ranks} tensor-parallel ranks; use a "
                f"smaller tensor-parallel size"
            )


def translate_parallel_style(style: str) -> ParallelStyle:
    """torch's parallel style for one of transformers' names of them.

    Raises:
        ValueError: a name that has no counterpart.
    """
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
        # A norm of q or k over each head's channels, whose heads lie on several ranks.
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    if style not in styles:
        raise ValueError(f"parallel style {style!r} is unknown: it must be one of {sorted(styles)}; pass a custom plan")
    return styles[style]()


def get_hf_tp_plan(model: nn.Module) -> Plan:
    """transformers' own plan for `model`, in torch's styles; the lm head keeps its logits sharded.

    Raises:
        ValueError: transformers has no plan for this model, or one with a style that `translate_parallel_style` lacks.
    """
    text, head = text_model_path(model), output_head_path(model)
    prefix = f"{text}." if text else ""
    own = getattr(model, "_tp_plan", None) or {}
    inner = getattr(text_model(model).config, "base_model_tp_plan", None) or {}
    names = {f"{prefix}{name}": style for name, style in inner.items()} | own
    if not names:
        raise ValueError(f"transformers has no tp_plan for {type(model).__name__}; pass a custom_parallel_plan")
    plan = {name: translate_parallel_style(style) for name, style in names.items() if style != "replicate"}
    plan.setdefault(f"{prefix}embed_tokens", RowwiseParallel(input_layouts=Replicate()))
    plan[head] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return plan


def custom_plan(plan: Mapping[str, Any] | str) -> Plan:
    """A caller's plan: module names to styles, torch's or transformers' names of them; or where to import that from.

    Args:
        plan: the mapping itself, or "package.module.NAME" of a mapping, or of a function without arguments that
            makes one.

    Raises:
        ValueError: it is neither, cannot be imported, or has values that are not styles.
    """
    found: Any = plan
    if isinstance(plan, str):
        path, _, name = plan.rpartition(".")
        try:
            found = getattr(importlib.import_module(path), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"custom_parallel_plan is {plan!r}, which cannot be imported ({error}); pass 'package.module.NAME'"
            ) from error
        if callable(found):
            found = found()
    if not isinstance(found, Mapping):
        raise ValueError(
            f"custom_parallel_plan is a {type(found).__name__}: it must map module names to styles, or be the import "
            f"path of such a mapping"
        )
    styles = {
        name: translate_parallel_style(style) if isinstance(style, str) else style for name, style in found.items()
    }
    for name, style in styles.items():
        if not isinstance(style, ParallelStyle):
            raise ValueError(
                f"custom_parallel_plan[{name!r}] is a {type(style).__name__}: it must be a "
                f"torch.distributed.tensor.parallel style, or transformers' name of one"
            )
    return styles
