"""Cross entropy, log-probabilities and entropy: from hidden states, a chunk of logits at a time, or from
vocabulary-parallel logits.

Shapes: `[...]` are the leading dims of the labels, D the hidden size, V the vocabulary, R the ranks of `tp_group`.
"""

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, VocabShard
from megatron_ext.head.checks import (
    Bits,
    Cache,
    HiddenLayout,
    Reduction,
    check_floating,
    check_integers,
    check_same_shape,
    one_of,
    tells_torchs_names,
    token_bound,
)
from megatron_ext.head.lm_head import LmHead
from megatron_ext.head.logits import Logits
from megatron_ext.head.lora import LoRA
from megatron_ext.head.readouts.read_out import CrossEntropy, IsArgmax, LogProbs, ReadOut
from megatron_ext.head.readouts.row_sums import Entropy
from megatron_ext.numerics.tensors import accumulation_dtype


@tells_torchs_names
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: Group = None,
    hidden_layout: HiddenLayout = "replicated",
    *,
    bias: Tensor | None = None,
    vocab: VocabShard | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    reduction: Reduction = "none",
    cache: Cache = "bounded",
    chunk_tokens: int | None = None,
    skip_ignored: bool | int = False,
    loss_mask: Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    bits: Bits | None = None,
    logit_dtype: torch.dtype | None = None,
    lora: LoRA | Sequence[LoRA] | None = None,
) -> Tensor:
    """Cross entropy of `hidden @ weight.T` against `labels`, a chunk of logits at a time.

    The loss of a token is `(1 - e) nll - e mean_log_prob + z_loss lse^2` over the whole vocabulary, with e the label
    smoothing, as in `torch.nn.functional.cross_entropy`. Backward takes any gradient per token.

    Args:
        hidden: `[..., D]`; with the sequence layout this rank's equal slice of dim 0. fp32, bf16, fp16 or fp64.
        weight: `[V/R, D]`, this rank's vocabulary shard, of the same dtype (any under autocast).
        labels: `[...]`, integers: global token ids, of the full sequence in either layout.
        tp_group: the ranks that share the vocabulary; None: Megatron's tensor-parallel group where `parallel_state` is
            initialised, else no sharding.
        hidden_layout: "replicated": all ranks hold the same hidden states; "sequence": each holds its slice.
        bias: `[V/R]`, added to the logits. Columns with a bias of -inf do not count.
        vocab: this rank's columns; None: equal shards in rank order, all columns count.
        ignore_index: tokens with this label get 0 and no gradient.
        softcap, temperature: logits become `softcap * tanh(logits / softcap) / temperature`.
        reduction: "none", "sum", or "mean" over the tokens that count (0 if none does). If the default `cache` would
            not keep all logits, forward makes the gradients of a sum or mean, with 6 T V D / R FLOPs instead of up to
            8: see `weights` of `LmHead.read`. It does not if `loss_mask` requires a gradient.
        cache: fraction in [0, 1] of the logits whose exponentials are kept for backward: 1 is fastest, 0 takes least
            memory. Or a number of bytes, "bounded" or "auto": see `LmHead`.
        chunk_tokens: tokens per chunk; None: chosen from the sizes. It changes memory and speed, not the result; where
            forward makes the gradients it must be the same on all ranks.
        skip_ignored: True leaves out the tokens that do not count before the first matmul, with one host sync and
            dynamic shapes. An int bounds the tokens that count, without either: see `at_most` of `LmHead.read`.
        loss_mask: `[...]`; losses are multiplied by it, and tokens where it is 0 do not count.
        gradient_accumulation_fusion: backward adds the weight gradient into `weight.main_grad`, by Megatron's protocol.
        bits: "fast"; "batch": a token's bits do not depend on other tokens, chunks or layout; "tensor_parallel": nor on
            the number of ranks; None: "batch" if a batch-invariant mode is on, else "fast". See `LmHead`.
        logit_dtype: the hidden states' 16-bit dtype, to which logits are rounded as in inference engines; see `LmHead`.
        lora: low-rank parts of the head, `megatron_ext.head.LoRA(A, B, scaling)` or several.

    Returns:
        `[...]` (a scalar if reduced), fp32 (fp64 for fp64), the same on every rank.

    Communicates, at R > 1: forward 1 collective (1 for each chunk of tokens where forward makes the gradients),
    backward 1; with the sequence layout one more in each.

    Raises:
        ValueError: an argument breaks its rule; the message says which, and the fix.
    """
    if reduction != "none":
        one_of("reduction", reduction, get_args(Reduction))
    head = LmHead(
        weight,
        tp_group,
        hidden_layout,
        bias=bias,
        vocab=vocab,
        softcap=softcap,
        temperature=temperature,
        cache=cache,
        chunk_tokens=chunk_tokens,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        bits=bits,
        logit_dtype=logit_dtype,
        lora=lora,
    )
    asked, counts, at_most, weights = labels, None, None, None
    if skip_ignored or loss_mask is not None:
        asked = masked(labels, loss_mask, ignore_index)
    if skip_ignored:
        counts, at_most = asked != ignore_index, token_bound(skip_ignored)
    if reduction != "none" and (loss_mask is None or not loss_mask.requires_grad):
        weights = token_weights(labels, loss_mask, ignore_index, reduction, hidden)
    read_out = CrossEntropy(asked, ignore_index, label_smoothing, z_loss)
    loss = head.read(hidden, read_out, counts=counts, at_most=at_most, weights=weights)
    if weights is not None or (loss_mask is None and reduction == "none"):
        return loss
    return reduced(loss, labels, loss_mask, ignore_index, reduction)


@tells_torchs_names
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: Group = None,
    hidden_layout: HiddenLayout = "replicated",
    *,
    bias: Tensor | None = None,
    vocab: VocabShard | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    cache: Cache = "bounded",
    chunk_tokens: int | None = None,
    skip_ignored: bool | int = False,
    loss_mask: Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    return_entropy: bool = False,
    return_hits: bool = False,
    bits: Bits | None = None,
    logit_dtype: torch.dtype | None = None,
    lora: LoRA | Sequence[LoRA] | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probability of each label under `softmax(hidden @ weight.T)`, a chunk of logits at a time.

    Arguments, communication and errors are those of `linear_cross_entropy`; `loss_mask` only says which tokens count.

    Returns:
        `[...]`, fp32 (fp64 for fp64), 0 for tokens that do not count. With `return_entropy` or `return_hits` a tuple of
        it, the entropy of each token's distribution (as asked for; same dtype, differentiable, 0 likewise), and whether
        the label has the largest logit (as asked for; bool, False likewise; the lowest id wins among equals).
    """
    head = LmHead(
        weight,
        tp_group,
        hidden_layout,
        bias=bias,
        vocab=vocab,
        softcap=softcap,
        temperature=temperature,
        cache=cache,
        chunk_tokens=chunk_tokens,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        bits=bits,
        logit_dtype=logit_dtype,
        lora=lora,
    )
    asked = masked(labels, loss_mask, ignore_index)
    counts = asked != ignore_index if skip_ignored or return_entropy else None
    readouts = log_prob_readouts(asked, ignore_index, counts if return_entropy else None, return_hits)
    return head.read(hidden, *readouts, counts=counts if skip_ignored else None, at_most=token_bound(skip_ignored))


@tells_torchs_names
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    reduction: Reduction = "none",
    chunk_tokens: int | None = None,
    loss_mask: Tensor | None = None,
    gradient_into_logits: bool = False,
) -> Tensor:
    """Cross entropy of vocabulary-sharded logits: `linear_cross_entropy` for callers who have the logits already.

    Args:
        logits: `[..., V/R]`, this rank's columns, any floating dtype. Columns of -inf do not count for their token.
        labels: `[...]`, integers: global token ids.
        gradient_into_logits: backward writes the gradient into the memory of `logits` instead of new memory. Backward
            then runs once, and autograd raises for code that needs the logits afterwards. A leaf is not overwritten.

    The other arguments, the result and the errors are those of `linear_cross_entropy`. Nothing of vocabulary size is
    saved beside the logits. The gradient has the logits' dtype.

    Communicates: forward 1 collective at R > 1, backward none.
    """
    one_of("reduction", reduction, get_args(Reduction))
    z = Logits(
        logits,
        tp_group,
        vocab=vocab,
        softcap=softcap,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        gradient_into_logits=gradient_into_logits,
    )
    loss = z.read(CrossEntropy(masked(labels, loss_mask, ignore_index), ignore_index, label_smoothing, z_loss))
    return reduced(loss, labels, loss_mask, ignore_index, reduction)


@tells_torchs_names
def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    loss_mask: Tensor | None = None,
    gradient_into_logits: bool = False,
    return_entropy: bool = False,
    return_hits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`linear_log_probs` for callers who have the vocabulary-sharded logits already.

    Arguments, communication and errors are as for `vocab_parallel_cross_entropy`, results as for `linear_log_probs`.
    """
    z = Logits(
        logits,
        tp_group,
        vocab=vocab,
        softcap=softcap,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        gradient_into_logits=gradient_into_logits,
    )
    asked = masked(labels, loss_mask, ignore_index)
    counts = asked != ignore_index if return_entropy else None
    return z.read(*log_prob_readouts(asked, ignore_index, counts, return_hits))


@tells_torchs_names
def token_entropy(
    logits: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    gradient_into_logits: bool = False,
) -> Tensor:
    """Entropy `-sum p log p` of each token's distribution, from vocabulary-sharded logits `[..., V/R]`.

    Returns:
        `[...]`, fp32 (fp64 for fp64), differentiable.

    Communicates: forward 1 collective at R > 1, backward none. Raises as `vocab_parallel_cross_entropy`.
    """
    z = Logits(
        logits,
        tp_group,
        vocab=vocab,
        softcap=softcap,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        gradient_into_logits=gradient_into_logits,
    )
    return z.read(Entropy())


def masked(labels: Any, loss_mask: Tensor | None, ignore_index: int) -> Tensor:
    """Return the labels as int64, `ignore_index` where the mask is 0."""
    check_integers("labels", labels)
    if loss_mask is None:
        return labels.long()  # in uint8 -100 would become 156
    check_same_shape("loss_mask", loss_mask, labels)
    return labels.long().masked_fill(loss_mask == 0, ignore_index)


def log_prob_readouts(labels: Tensor, ignore_index: int, counts: Tensor | None, hits: bool) -> list[ReadOut]:
    """Return the read-outs of log-probabilities; of entropies, given `counts`; and of hits, if `hits`."""
    readouts: list[ReadOut] = [LogProbs(labels, ignore_index)]
    if counts is not None:
        readouts.append(Entropy(counts))
    if hits:
        readouts.append(IsArgmax(labels, ignore_index))
    return readouts


def side_by_side(found: Any, token_dims: int) -> Tensor:
    """Concatenate results of read-outs, each `[...]` or `[..., K]`, to one tensor `[..., columns]`, in their order.

    Token ids become numbers of the other results' dtype, which in fp32 is exact below 2^24.
    """
    leaves = torch.utils._pytree.tree_leaves(found)
    return torch.cat([x.unsqueeze(-1) if x.dim() == token_dims else x for x in leaves], -1)


def token_weights(
    labels: Tensor, loss_mask: Tensor | None, ignore_index: int, reduction: Reduction, hidden: Tensor
) -> Tensor:
    """Return weights `[...]` with which the weighted sum of losses is `reduced`, for a mask without a gradient."""
    check_integers("labels", labels)
    check_floating("hidden", hidden)
    kept = labels.long() != ignore_index
    weights = (kept if loss_mask is None else kept * loss_mask).to(accumulation_dtype(hidden.dtype))
    if reduction == "sum":
        return weights
    total = weights.sum()
    return weights / total.where(total != 0, 1.0)


def reduced(loss: Tensor, labels: Tensor, loss_mask: Tensor | None, ignore_index: int, reduction: Reduction) -> Tensor:
    """Return the losses times the mask; or their sum, or their mean over the tokens that count (0 if none does)."""
    if loss_mask is not None:
        loss = loss * loss_mask.to(loss.dtype)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    kept = labels.long() != ignore_index
    weight = (kept if loss_mask is None else kept * loss_mask).sum(dtype=loss.dtype)
    return loss.sum() / weight.where(weight != 0, 1.0)
