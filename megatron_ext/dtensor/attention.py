"""Attention for transformers' models: causal, windowed, packed, context-parallel; transformers builds no mask for it.

`use_attention(model)` names the function in the model's config and puts a hook before the model's forward. The hook
turns the caller's arguments about sequences (padding mask, document boundaries, positions) into one `SequenceLayout`,
which goes through transformers' keyword arguments down to the attention function.

Suffixes: B batch, S tokens of this rank, K tokens of the whole sequence (W * S), H heads and D channels of this rank.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.groups import Group, group_size
from megatron_ext.dtensor.decoder import embedding, import_transformers, text_model
from megatron_ext.dtensor.layers import Unknown, check_attention
from megatron_ext.dtensor.output.stand_ins import FUSED
from megatron_ext.dtensor.sequence_arguments import (
    Refusal,
    SequenceArguments,
    SequenceLayout,
    refuse_later,
    tells_of_token_ids,
    token_id_fault,
)
from megatron_ext.numerics.batch_invariance import attention_kernels
from megatron_ext.sequence.attention import Window, attend

NAME = "megatron_ext"
# Arguments that transformers passes to attention functions and that do not change the result: positions, which are in
# queries and keys already; boundaries of documents, which the layout holds; and options of the model's output.
_WITHOUT_EFFECT = {
    "position_ids",
    "position_embeddings",
    "cache_position",
    "use_cache",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "logits_to_keep",
    "return_dict",
    "num_items_in_batch",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "deterministic",
    "target_dtype",
}
_HOOK = "_megatron_ext_sequence_hook"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sequence_layout: SequenceLayout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention by transformers' interface: queries `[B, H, S, D]`, keys and values with H or fewer heads.

    `s_aux`: attention sinks, `[H]` (GPT-OSS).

    Returns:
        `[B, S, H, D]`, and None in the place of attention weights.

    Communicates: under context parallelism one all-gather of keys and values; backward one reduce-scatter.

    Raises:
        ValueError: the model was not prepared by `use_attention`, its attention is not causal, or it passes an argument
            that is unknown here.
    """
    for name, given in others.items():
        if given is not None and name not in _WITHOUT_EFFECT:
            raise ValueError(
                f"{type(module).__name__} passes {name} to its attention, and {NAME!r} does not know what that does; "
                f"use 'sdpa'"
            )
    if sequence_layout is None or attention_mask is not None:
        raise ValueError(
            f"attention {NAME!r} was called with attention_mask={type(attention_mask).__name__} and without a sequence "
            f"layout: it takes these from a hook on the model; call megatron_ext.dtensor.use_attention(model)"
        )
    by_config = getattr(getattr(module, "config", None), "is_causal", True)
    if not (getattr(module, "is_causal", True) and by_config) or others.get("is_causal") is False:
        raise ValueError(f"{type(module).__name__} is not causal, and {NAME!r} knows causal attention only; use 'sdpa'")
    packing, hidden = sequence_layout.packing, sequence_layout.hidden_BK
    batch, heads, tokens = query.shape[:3]
    # Norms of queries and keys may have made them fp32; kernels take a single dtype.
    q, k = query.to(value.dtype).permute(2, 0, 1, 3), key.to(value.dtype).permute(2, 0, 1, 3)
    v = value.permute(2, 0, 1, 3)
    if packing is not None and batch > 1:
        q, k, v = (x.transpose(0, 1).flatten(0, 1).unsqueeze(1) for x in (q, k, v))
    with attention_kernels(q):
        out = attend(
            q,
            k,
            v,
            Window(left=None if sliding_window is None else sliding_window - 1, right=0),
            mask=None if hidden is None else hidden[:, None, None],
            q_packing=packing,
            kv_packing=packing,
            cp_group=sequence_layout.cp_group,
            scale=scaling,
            dropout=dropout,
            softcap=softcap,
            sinks=s_aux.to_local() if isinstance(s_aux, DTensor) else s_aux,
            fault=sequence_layout.refusal.fault,
        )
    if packing is not None and batch > 1:
        return out.view(batch, tokens, heads, -1), None
    return out.transpose(0, 1), None


def use_attention(
    model: nn.Module, cp_group: Group = None, tensor_parallel_size: int = 1, sequence_parallel: bool = False
) -> nn.Module:
    """Make `model`, a transformers model with a text decoder, attend by `attention`; change it in place and return it.

    The model's forward then takes `input_ids` `[B, S]` (the only argument that may be positional), transformers' other
    arguments, and:

    - `attention_mask`: `[B, K]` of the whole sequence, 0 where a token is padding. Padding at the end of a row costs
      nothing.
    - `cu_seqlens` (or transformers' `cu_seq_lens_q`): integers `[documents + 1]`, B = 1: where documents begin in the
      sequence of all context-parallel ranks, padding counted.
    - `position_ids`: `[B, S]`, of this rank's tokens. None: computed from the arguments above. Without `cu_seqlens` and
      `attention_mask` a new document begins where positions do not go up by one, as in transformers; under context
      parallelism positions must be those of whole sequences.

    Args:
        cp_group: ranks that share each sequence; `input_ids` are then this rank's part in the zigzag layout
            (`megatron_ext.sequence.context_parallel_parts.SequenceParts`).
        tensor_parallel_size, sequence_parallel: how the model is sharded; sharded models refuse some arguments.

    Raises:
        ValueError: a layer of `model` attends in a way that is unknown here. From forward: an argument that would be
            ignored or give wrong results (caches, labels, images, masks of other shapes, `logits_to_keep` of a split
            sequence, positions that contradict the layout); token ids outside of the vocabulary, on every rank of
            `cp_group` and of the tensor-parallel group even if a single rank has them (on CUDA its device stops).
    """
    import_transformers().AttentionInterface.register(NAME, attention)
    try:
        check_attention(model)
    except Unknown as error:
        raise ValueError(
            f"{type(model).__name__} has {error}: not known here, it must keep its own attention"
        ) from error
    text = text_model(model)
    copies: dict[int, Any] = {}
    for module in model.modules():  # another model may have been made from the same config
        if "config" in module.__dict__:
            module.config = copy.deepcopy(module.config, copies)
    for module in text.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = NAME
    hook = SequenceArguments(cp_group, tensor_parallel_size if sequence_parallel else 1, tensor_parallel_size > 1)
    for module in dict.fromkeys((model, text)):  # once where both are one
        if _HOOK not in module.__dict__:
            module.register_forward_pre_hook(_lay_out, with_kwargs=True)
        module.__dict__[_HOOK] = hook
    for layer in text.layers:
        _lead_around(layer)
    for module in model.modules():
        if hasattr(module, "_update_causal_mask"):  # transformers 4.51 would build a dense mask for any unknown name
            module.__dict__["_update_causal_mask"] = _no_mask
    return model


def _lead_around(layer: nn.Module) -> None:
    """Pass the sequence layout from the arguments of `layer` to its attention, in case the layer itself does not."""
    if _HOOK in layer.__dict__:
        return
    layouts: list[SequenceLayout] = []
    layer.__dict__[_HOOK] = layouts

    def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        layouts[:] = [kwargs["sequence_layout"]] if "sequence_layout" in kwargs else []

    def bring(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        return (args, {**kwargs, "sequence_layout": layouts[0]}) if layouts else None

    layer.register_forward_pre_hook(keep, with_kwargs=True)
    layer.self_attn.register_forward_pre_hook(bring, with_kwargs=True)  # type: ignore[union-attr]


def sequence_hook(model: nn.Module) -> SequenceArguments | None:
    """Return the hook that `use_attention` put before `model`'s forward, or None."""
    return model.__dict__.get(_HOOK)


def lay_out(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """Return the arguments of a call of `model` after the hook of `use_attention`; without a hook, unchanged."""
    return (_lay_out(model, args, kwargs) if _HOOK in model.__dict__ else None) or (args, kwargs)


def _lay_out(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    if "sequence_layout" in kwargs:  # the text model, called by a model whose hook has run
        return None
    hook: SequenceArguments = module.__dict__[_HOOK]
    tokens, refusal = args[0] if args else kwargs.get("input_ids"), Refusal()
    if tokens is not None:
        rows, alone = embedding(module), group_size(hook.cp_group) == 1
        if not (alone and tells_of_token_ids(rows)):
            refusal.fault = token_id_fault(rows, tokens)
        if alone and refusal.fault is not None:
            raise refusal.fault
        if not alone:
            refuse_later(rows, refusal)
        if refusal.fault is not None:  # the model must run to tell the other ranks, with any tokens
            some = torch.zeros_like(tokens)
            args, kwargs = ((some, *args[1:]), kwargs) if args else (args, kwargs | {"input_ids": some})
    # A forward with our fused loss takes labels although logits are sharded, but not if sequences are.
    takes_labels = FUSED in module.__dict__ and group_size(hook.cp_group) == 1
    labels = {name: kwargs[name] for name in ("labels", "shift_labels") if takes_labels and name in kwargs}
    args, kwargs = hook(args, {name: x for name, x in kwargs.items() if name not in labels}, refusal)
    return args, kwargs | labels


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None
