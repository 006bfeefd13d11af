"""The proof of a model's fusion: a few tokens of a call go through its own layer and loss, and through the fused head.

The sample is taken at the input of the model's own output layer. The one way leads through that layer's own forward,
whatever it has become, and the model's own loss; the other leads through the head. The model's operations between layer
and loss act on promised logits, and so on both ways. All tensors are detached: nothing is added to a `.grad` or a
`main_grad`, and no hook of the layer sees the sample. With `verify=` the first calls compute both losses of all tokens,
and record them side by side.

Legend: S positions, B batch, H hidden size, R tensor-parallel ranks, N tokens of the sample.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_ext.autograd import leaves_of
from megatron_ext.distributed.groups import group_size
from megatron_ext.megatron.fused_loss.fusion_decision import LOSS
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.module_calls import standing
from megatron_ext.megatron.fused_loss.promised_logits import Terms, operands, tp_group
from megatron_ext.megatron.fused_loss.training_loss import linear_training_loss
from megatron_ext.megatron.fusion_report import ModelFusion
from megatron_ext.proof import SAMPLE_TOKENS, Proof, agreed, cannot_prove_now, compare
from megatron_ext.proof.comparison import LossOfHidden, main_grads_aside, rng_put_back
from megatron_ext.verify.side_by_side import RecordedStep, TwoRuns

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # of a call's mean loss; with 16 bits 1e-2

Loss = Callable[[Tensor, Tensor], Tensor]  # of labels [B, S] and logits [S, B, V/R]


def proof_of(model: Any, settings: HeadSettings, terms: Terms, weight: Tensor, labels_BS: Tensor) -> Proof:
    """Make a new proof, on which all tensor-parallel ranks agree by one exchange.

    `terms` and `weight`, gathered, are the operands of the loss that is about to be computed.
    """
    if (reason := cannot_prove_now()) is not None:
        return Proof.not_comparable(reason)
    try:
        pair = LossPair(model, settings, terms, weight, labels_BS, SAMPLE_TOKENS)
        _take_special_labels(pair.labels_N1)
    except ValueError as refusal:
        proof = Proof.not_comparable(str(refusal))
    else:
        proof = _proof(terms, pair)
    return agreed(proof, tp_group(terms.layer))


class LossPair:
    """Two functions from hidden states `[N, 1, H]` of a call to losses `[1, N]`: the model's own and the head's.

    Raises ValueError if the head refuses the layer.
    """

    def __init__(self, model: Any, settings: HeadSettings, terms: Terms, weight: Tensor, labels_BS: Tensor, most: int):
        with torch.inference_mode(False):
            self.hidden_N1H, self.labels_N1 = _sample(terms, labels_BS, most)
            self.weight = _alias(terms, weight)
        self.terms = replace(terms, weight=self.weight, made=None, hits=None)
        self.settings = HeadSettings(chunk_tokens=settings.chunk_tokens, cache=settings.cache, bits=settings.bits)
        self.own_loss = standing(model, LOSS)
        self.settings.lm_head(self.terms, self.weight)

    def own(self, hidden: Tensor) -> Tensor:
        """Return the losses by the layer's own forward, whatever it has become, and the model's own loss."""
        logits, scale = self.terms.make(self.terms, hidden), self.terms.scale
        return self.own_loss(self.labels_N1.transpose(0, 1), logits if scale == 1.0 else logits * scale)

    def fused(self, hidden: Tensor) -> Tensor:
        """Return the losses by the fused head, without the settings that change the loss."""
        hidden, operand = operands(self.terms, hidden)
        head = self.settings.lm_head(self.terms, operand)
        return linear_training_loss(head, hidden, self.labels_N1).loss.transpose(0, 1)


def _proof(terms: Terms, pair: LossPair) -> Proof:
    """Compare both losses, and refuse a model's own loss that depends on parameters other than the layer's."""
    known = {id(pair.weight), id(getattr(terms.layer, "bias", None))}
    strangers: list[Tensor] = []

    def own(hidden: Tensor) -> Tensor:
        known.add(id(hidden))
        losses = pair.own(hidden)
        strangers.extend(leaf for leaf in leaves_of(losses.grad_fn) if id(leaf) not in known)
        return losses

    with _state_put_back(terms.layer):
        proof = compare(own, pair.fused, pair.hidden_N1H, {"the output layer's weight": pair.weight})
    inside = [] if hasattr(terms.layer, "_orig_mod") else sorted({type(one).__name__ for one in terms.layer.children()})
    if proof.fused and inside and pair.hidden_N1H.itemsize == 2:
        return Proof.not_comparable(
            f"its output layer has modules inside ({', '.join(inside)}), as quantizers are, whose work may be as small "
            f"as the rounding of {pair.hidden_N1H.dtype}"
        )
    if strangers:
        shapes = ", ".join(str(list(x.shape)) for x in strangers)
        return Proof.not_comparable(
            f"its logits or its loss depend on parameters that are not the output layer's weight or bias, of {shapes}"
        )
    return proof


def verify_loss(
    model: Any, counters: ModelFusion, settings: HeadSettings, terms: Terms, weight: Tensor, labels_BS: Tensor
) -> None:
    """Compute both losses of a call, and append them to `counters.verified`."""
    pair = LossPair(model, settings, terms, weight, labels_BS, labels_BS.numel())
    with _state_put_back(terms.layer):
        stock = _step(pair.own, pair)
        ours = _step(pair.fused, pair)
    before = counters.verified or TwoRuns((), (), _TOLERANCE.get(pair.hidden_N1H.dtype, 1e-2))
    counters.verified = TwoRuns((*before.stock, stock), (*before.ours, ours), before.tolerance)


def _step(way: LossOfHidden, pair: LossPair) -> RecordedStep:
    """Compute the mean loss of all tokens and the norm of its gradients of hidden states and weight; record memory and
    time."""
    hidden = pair.hidden_N1H.detach().requires_grad_()
    weight, on_gpu = pair.weight, hidden.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    begun = time.perf_counter()
    with rng_put_back(hidden.device), torch.inference_mode(False), torch.enable_grad():
        asked = [hidden, *([weight] if weight.requires_grad else [])]
        with main_grads_aside({"weight": weight}) as aside:
            loss = way(hidden).float().mean()
            found = torch.autograd.grad(loss, asked, allow_unused=True)
            added = bool(aside) and getattr(weight, "grad_added_to_main_grad", False)
        gradients = [found[0], *aside.values()] if added else [*found, *aside.values()]
    norms = [x.detach().float().norm() for x in gradients if x is not None]
    norm = float(torch.stack(norms).norm())
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if on_gpu else None
    return RecordedStep(float(loss.detach()), norm, peak, time.perf_counter() - begun)


def _sample(terms: Terms, labels_BS: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Choose N tokens, at most `most`: return this rank's hidden states `[N, 1, H]`, and all ranks' labels `[N, 1]`.

    Under sequence parallelism the hidden states are `[N/R, 1, H]`. A label that is no token id becomes 0.
    """
    layer, hidden = terms.layer, terms.hidden
    group = tp_group(layer)
    ranks = group_size(group) if layer.sequence_parallel else 1
    positions, batch = hidden.shape[:2]
    count = min(max(1, most // ranks), positions * batch)
    at = torch.arange(count, device=hidden.device) * (positions * batch) // count
    row, column = at // batch, at % batch
    labels_SB = labels_BS.transpose(0, 1)
    labels_N = torch.cat([labels_SB[rank * positions + row, column] for rank in range(ranks)])
    known = (labels_N >= 0) & (labels_N < terms.shape[-1] * group_size(group))
    return hidden.detach()[row, column].unsqueeze(1), labels_N.where(known, 0).unsqueeze(1)


def _take_special_labels(labels_N1: Tensor) -> None:
    """Overwrite up to eight labels with the first ids of the vocabulary and the last ids up to the largest label.

    Padding and other special tokens have such ids; a loss may leave them out, and a batch may lack them. No id above
    the largest label is used: a loss may index a table without the rows that pad the vocabulary.
    """
    some = min(8, labels_N1.shape[0] // 2)
    ids = torch.arange(some, device=labels_N1.device) - some // 2
    labels_N1[:some, 0] = ids.where(ids >= 0, labels_N1.amax() + 1 + ids).clamp(min=0).minimum(labels_N1.amax())


def _alias(terms: Terms, weight: Tensor) -> Tensor:
    """Return a leaf of its own on the weight's memory, with a `main_grad` if gradients are added to one."""
    weight = weight if isinstance(terms.own_weight, DTensor) else terms.own_weight
    deferred = getattr(getattr(terms.layer, "config", None), "defer_embedding_wgrad_compute", False)
    alias = weight.detach().requires_grad_(weight.requires_grad and not deferred)
    if terms.layer.gradient_accumulation_fusion:
        given = getattr(terms.own_weight, "main_grad", None)
        alias.main_grad = torch.zeros_like(alias, dtype=torch.float32) if given is None else given  # type: ignore
        alias.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return alias


@contextmanager
def _state_put_back(layer: Any) -> Iterator[None]:
    """Restore Megatron's random streams and the buffers of a deferred weight gradient when the context ends."""
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
