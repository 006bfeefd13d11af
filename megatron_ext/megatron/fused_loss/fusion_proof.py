"""The proof of a model's fusion: a few tokens of a call go through its own layer and loss, and through the fused head.

From the input of the model's own output layer they go through that layer's own forward, whatever it has become, to the
model's own loss; and through the head. What the model does between the two it does to promised logits, and so to both.
Everything is taken of detached tensors: nothing is added to a `.grad` or a `main_grad`, and no hook of the layer sees
the sample.

Legend: S positions, B batch, H hidden size, R tensor-parallel ranks, N tokens of the sample.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.groups import group_size
from megatron_ext.head.training_loss import LossSettings, linear_training_loss
from megatron_ext.megatron.fused_loss import patch_points
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.module_calls import innermost, split_hooks
from megatron_ext.megatron.fused_loss.promised_logits import Terms, operands, tp_group
from megatron_ext.proof import SAMPLE_TOKENS, Basis, Proof, Proofs, compare, proof_mode

Loss = Callable[[Tensor, Tensor], Tensor]  # of labels [B, S] and logits [S, B, V/R]

# By whether the model trains: its own loss may be another one when it does not.
_PROOFS = {True: Proofs(), False: Proofs()}
# What of a model's configuration decides about its output layer and its loss.
_CONFIG = (
    *("sequence_parallel", "tensor_model_parallel_size", "params_dtype", "gradient_accumulation_fusion"),
    *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "defer_embedding_wgrad_compute"),
    *("bf16", "fp16", "fp8", "fp4"),
)
# Functions that Megatron's own layer and loss look up where they stand, and others replace there.
_FUNCTIONS = (
    ("megatron.core.tensor_parallel", "vocab_parallel_cross_entropy"),
    ("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy"),
    ("megatron.core.tensor_parallel.layers", "linear_with_grad_accumulation_and_async_allreduce"),
    (LanguageModule.__module__, "fused_vocab_parallel_cross_entropy"),
    (LanguageModule.__module__, "te_parallel_cross_entropy"),
)


def proof_of(model: Any, settings: HeadSettings, terms: Terms, weight: Tensor, labels_BS: Tensor) -> Proof:
    """The proof that holds for a call: of an earlier one, as long as what it rests on is the same, or a new one.

    `terms` and `weight` are those that the loss is about to be taken from, the weight gathered. A new proof is made
    on all tensor-parallel ranks, which agree on it by one exchange.
    """
    layer = terms.layer

    def prove() -> Proof:
        return _proof(terms, weight, labels_BS, patch_points.own_loss(model), settings)

    return _PROOFS[model.training].of(
        model, lambda: _basis(model, layer), prove, proof_mode(settings.proof), [tp_group(layer)]
    )


def refusal(model: Any, settings: HeadSettings) -> str | None:
    """Why an earlier call has left the model to its own loss, if what that rests on is the same; None else."""
    proofs = _PROOFS[model.training]
    made = proofs.made(model)
    if made is None or made.fused or proof_mode(settings.proof) != "first":
        return None
    layer = patch_points.output_layer(model)
    holds = proofs.holding(model, lambda: _basis(model, layer)) is not None
    return reason_of(made, model) if holds else None


def reason_of(proof: Proof, model: Any) -> str:
    """Why a proof leaves the model to its own loss, with what of it is neither Megatron's nor ours."""
    return "; ".join(filter(None, (str(proof), patch_points.what_is_not_known(model))))


def _proof(terms: Terms, weight: Tensor, labels_BS: Tensor, own_loss: Loss, settings: HeadSettings) -> Proof:
    """The comparison of `own_loss` of the layer's logits with the head's loss under no settings of its own."""
    with torch.inference_mode(False):
        hidden_N1H, labels_N1 = _sample(terms, labels_BS)
        weight = _alias(terms, weight)
    bare = replace(terms, weight=weight, made=None, hits=None)
    plain = HeadSettings(chunk_tokens=settings.chunk_tokens, cache=settings.cache, bits=settings.bits)
    try:
        plain.lm_head(bare, weight)
    except ValueError as refusal:
        return Proof.not_comparable(str(refusal))
    known = {id(weight), id(getattr(terms.layer, "bias", None))}
    strangers: list[Tensor] = []

    def own(hidden: Tensor) -> Tensor:
        known.add(id(hidden))
        logits = terms.make(bare, hidden)
        losses = own_loss(labels_N1.transpose(0, 1), logits if terms.scale == 1.0 else logits * terms.scale)
        strangers.extend(leaf for leaf in _leaves(losses) if id(leaf) not in known)
        return losses

    def fused(hidden: Tensor) -> Tensor:
        hidden, operand = operands(bare, hidden)
        head = plain.lm_head(bare, operand)
        return linear_training_loss(head, hidden, labels_N1, LossSettings()).loss.transpose(0, 1)

    with _state_put_back(terms.layer):
        proof = compare(own, fused, hidden_N1H, {"the output layer's weight": weight})
    if strangers:
        shapes = ", ".join(str(list(x.shape)) for x in strangers)
        return Proof.not_comparable(
            f"its logits or its loss depend on parameters that are not the output layer's weight or bias, of {shapes}"
        )
    return proof


def _sample(terms: Terms, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states `[N, 1, H]` of this rank, spread over all that it has, and the labels `[N, 1]` of all ranks.

    Under sequence parallelism each rank has N/R of them. A label that is no token id becomes 0.
    """
    layer, hidden = terms.layer, terms.hidden
    group = tp_group(layer)
    ranks = group_size(group) if layer.sequence_parallel else 1
    positions, batch = hidden.shape[:2]
    count = min(max(1, SAMPLE_TOKENS // ranks), positions * batch)
    at = torch.arange(count, device=hidden.device) * (positions * batch) // count
    row, column = at // batch, at % batch
    labels_SB = labels_BS.transpose(0, 1)
    labels_N = torch.cat([labels_SB[rank * positions + row, column] for rank in range(ranks)])
    known = (labels_N >= 0) & (labels_N < terms.columns * group_size(group))
    return hidden.detach()[row, column].unsqueeze(1), labels_N.where(known, 0).unsqueeze(1)


def _alias(terms: Terms, weight: Tensor) -> Tensor:
    """The weight's memory in a leaf of its own, with a `main_grad` where gradients are added to one."""
    weight = weight if isinstance(terms.own_weight, DTensor) else terms.own_weight
    deferred = getattr(getattr(terms.layer, "config", None), "defer_embedding_wgrad_compute", False)
    alias = weight.detach().requires_grad_(weight.requires_grad and not deferred)
    if terms.layer.gradient_accumulation_fusion:
        given = getattr(terms.own_weight, "main_grad", None)
        alias.main_grad = torch.zeros_like(alias, dtype=torch.float32) if given is None else given  # type: ignore
        alias.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return alias


def _leaves(losses: Tensor) -> Iterator[Tensor]:
    """The tensors that gradients of `losses` would go to."""
    nodes = [losses.grad_fn]
    seen = {None, *nodes}
    for node in nodes:  # which grows meanwhile
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        for source, _ in getattr(node, "next_functions", ()):
            if source not in seen:
                seen.add(source)
                nodes.append(source)


@contextmanager
def _state_put_back(layer: Any) -> Iterator[None]:
    """Megatron's random streams, and the buffers of a deferred weight gradient, are afterwards what they were."""
    buffers = [getattr(layer, name, None) for name in ("embedding_activation_buffer", "grad_output_buffer")]
    lengths = [None if buffer is None else len(buffer) for buffer in buffers]
    tracker = megatron_random._CUDA_RNG_STATE_TRACKER
    states = tracker.get_states() if tracker is not None and tracker.is_initialized() else None
    try:
        yield
    finally:
        for buffer, length in zip(buffers, lengths, strict=True):
            if buffer is not None:
                del buffer[length:]
        if states is not None:
            tracker.set_states(states)


def _basis(model: Any, layer: Any) -> Basis:
    """What decides whether the layer and the loss are what the head takes them for, by identity."""
    config = getattr(model, "config", None)
    _, others = split_hooks(layer)
    weight = getattr(layer, "weight", None)
    return Basis(
        *(type(model), innermost(patch_points.own_loss(model)), _numbers(model)),
        *(layer, type(layer), type(layer).forward, innermost(vars(layer).get("forward"))),
        *(innermost(getattr(layer, "_forward_impl", None)), _numbers(layer)),
        [innermost(hook) for hooks in others for hook in hooks.values()],
        None if weight is None else weight.dtype,
        [getattr(config, name, None) for name in _CONFIG],
        [getattr(importlib.import_module(module), name, None) for module, name in _FUNCTIONS],
    )


def _numbers(owner: Any) -> list[tuple[str, float]]:
    """The factors, caps and temperatures that an object holds. Whole numbers may be counters."""
    return [(name, value) for name, value in vars(owner).items() if type(value) is float]
