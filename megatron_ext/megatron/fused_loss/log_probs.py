"""A model's `forward` with one option more: log-probabilities of next tokens instead of losses.

The model itself takes labels that are shifted already. With the option it takes token ids and shifts them, across the
borders of context-parallel parts, but not across the borders of packed documents.
"""

import inspect
from typing import Any

from torch import Tensor

from megatron_ext.distributed.groups import context_parallel_group, group_size
from megatron_ext.head.checks import or_refuse
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from megatron_ext.sequence.next_token import next_tokens

IGNORE_INDEX = -100
OPTION = "return_logprobs_for_linear_ce_fusion"
_READ = ("labels", "input_ids", "position_ids", "packed_seq_params", "loss_mask")  # arguments that are read here


class HeadRefusal(ValueError):
    """Refusal by the head on one rank, raised when all exchanges over the context-parallel ranks are over."""


def of_next_tokens(model: Any, settings: HeadSettings, call: Any, given: inspect.BoundArguments) -> Tensor:
    """Return log-probabilities `[B, S - 1]`, from the losses of `call`, a forward of `model`. `given`: the arguments of
    the call, the model among them, with token ids as labels."""
    if settings.label_smoothing or settings.z_loss:
        raise ValueError(
            f"{OPTION} is True and the fused head was asked for label_smoothing={settings.label_smoothing} and "
            f"z_loss={settings.z_loss}: values or gradients would not be those of log-probabilities; patch with "
            f"label_smoothing=0.0 and z_loss=0.0"
        )
    parts, tokens_BS, labels_BS = next_labels(model, given.arguments)
    given.arguments["labels"] = labels_BS
    mask_BS = given.arguments.get("loss_mask")
    if model.config.mtp_num_layers or (settings.skip_ignored and mask_BS is not None):
        if mask_BS is None:
            mask_BS = (labels_BS != IGNORE_INDEX).to(labels_BS.dtype)
        else:
            whole = mask_BS if mask_BS.shape == tokens_BS.shape else parts.gather(mask_BS, 1)
            mask_BS = _shifted(whole, given.arguments, parts, 0)
        given.arguments["loss_mask"] = mask_BS
    like = next(model.parameters())
    loss_BS, fault = or_refuse(lambda: call(*given.args[1:], **given.kwargs), labels_BS.shape, like, HeadRefusal)
    log_probs_BS = (0.0 - loss_BS).where(labels_BS != IGNORE_INDEX, 0.0)
    return parts.gather_or_refuse(log_probs_BS, 1, fault)[:, :-1]


def next_labels(model: Any, given: dict[str, Any]) -> tuple[SequenceParts, Tensor, Tensor]:
    """Return the split of sequences over the context-parallel ranks (the model's, or this batch's own), the token ids
    `[B, S]` of whole sequences, and this rank's labels. `given`: the arguments of the model's call."""
    own = getattr(model, "cp_group", None) or getattr(getattr(model, "pg_collection", None), "cp", None)
    parts = SequenceParts.of(context_parallel_group(own), given.get("packed_seq_params"))
    tokens_BS = _whole_tokens(given, parts)
    return parts, tokens_BS, _shifted(tokens_BS, given, parts, IGNORE_INDEX)


def _whole_tokens(given: dict[str, Any], parts: SequenceParts) -> Tensor:
    """Return the token ids `[B, S]` of whole sequences, given as `labels`, or without labels as `input_ids`."""
    tokens_BS = given.get("input_ids") if given.get("labels") is None else given["labels"]
    if tokens_BS is None:
        raise ValueError(
            "labels and input_ids are None: log-probabilities need tokens; pass the token ids, not shifted, as "
            "labels=input_ids"
        )
    ranks = group_size(parts.group)
    own = next((given[k].shape[-1] for k in ("input_ids", "position_ids") if given.get(k) is not None), None)
    if tokens_BS.dim() != 2 or (own is not None and tokens_BS.shape[1] not in (own, own * ranks)):
        raise ValueError(
            f"labels have shape {tuple(tokens_BS.shape)} for {own} positions of this rank: with {OPTION}=True they "
            f"must be token ids [batch, sequence] of "
            f"{'the same sequence' if ranks == 1 else f'this part of the sequence, or of all {ranks} parts'}; pass "
            f"labels=input_ids, they are shifted inside"
        )
    return tokens_BS if ranks == 1 or tokens_BS.shape[1] != own else parts.gather(tokens_BS, 1)


def _shifted(whole_BS: Tensor, given: dict[str, Any], parts: SequenceParts, fill: int) -> Tensor:
    """Shift whole sequences by one position, and return this rank's part; `fill` where a document ends."""
    packed = given.get("packed_seq_params")
    lengths = padded = None
    if packed is not None:
        lengths, padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    return parts.split(next_tokens(whole_BS, lengths, padded, ignore_index=fill), 1)


def masked(labels: Tensor, loss_mask: Tensor) -> Tensor:
    """Return labels with `IGNORE_INDEX` where the mask is 0; multi-token prediction rolls labels and mask alike."""
    if loss_mask.shape != labels.shape:
        raise ValueError(
            f"loss_mask has shape {tuple(loss_mask.shape)}, labels {tuple(labels.shape)}: with skip_ignored they must "
            f"have the same; pass a number for each label"
        )
    return labels.masked_fill(loss_mask == 0, IGNORE_INDEX)


def with_arguments_read(signature: inspect.Signature) -> inspect.Signature:
    """Return `signature` with a named parameter for each argument that is read here and that `**kwargs` would take."""
    catches = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in _READ if catches else ():
        if name not in signature.parameters:
            signature = with_argument(signature, name, None)
    return signature


def with_argument(signature: inspect.Signature, name: str, default: Any) -> inspect.Signature:
    """Return `signature` with one keyword-only argument more."""
    new = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
    parameters = list(signature.parameters.values())
    end = len(parameters) - any(p.kind is p.VAR_KEYWORD for p in parameters)
    return signature.replace(parameters=[*parameters[:end], new, *parameters[end:]])
