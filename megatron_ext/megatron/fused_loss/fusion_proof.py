"""The proof of a model's fusion: a few tokens of a call go through its own layer and loss, and through the fused head.

From the input of the model's own output layer they go through that layer's own forward, whatever it has become, to the
model's own loss; and through the head. What the model does between the two it does to promised logits, and so to both.
Everything is taken of detached tensors: nothing is added to a `.grad` or a `main_grad`, and no hook of the layer sees
the sample.

Legend: S positions, B batch, H hidden size, R tensor-parallel ranks, N tokens of the sample.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.groups import group_size
from megatron_ext.head.training_loss import LossSettings, linear_training_loss
from megatron_ext.megatron.fused_loss import patch_points
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.promised_logits import Terms, operands, tp_group
from megatron_ext.proof import SAMPLE_TOKENS, Proof, agreed, cannot_prove_now, compare

Loss = Callable[[Tensor, Tensor], Tensor]  # of labels [B, S] and logits [S, B, V/R]


def proof_of(model: Any, settings: HeadSettings, terms: Terms, weight: Tensor, labels_BS: Tensor) -> Proof:
    """A new proof, on which all tensor-parallel ranks agree by one exchange.

    `terms` and `weight` are those that the loss is about to be taken from, the weight gathered.
    """
    if (reason := cannot_prove_now()) is not None:
        return Proof.not_comparable(reason)
    proof = _proof(terms, weight, labels_BS, patch_points.own_loss(model), settings)
    return agreed(proof, tp_group(terms.layer))


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
    inside = [] if hasattr(terms.layer, "_orig_mod") else sorted({type(one).__name__ for one in terms.layer.children()})
    if proof.fused and inside and hidden_N1H.itemsize == 2:
        return Proof.not_comparable(
            f"its output layer has modules inside ({', '.join(inside)}), as quantizers are, whose work may be as small "
            f"as the rounding of {hidden_N1H.dtype}"
        )
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
