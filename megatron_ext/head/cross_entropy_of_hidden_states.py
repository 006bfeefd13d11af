"""Cross entropy, log-probabilities and entropy of labels from hidden states: no logits are kept.

Shapes: `[...]` are the leading dims of the labels, D the hidden size, V the vocabulary, R the ranks of `tp_group`.
"""

import dataclasses
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed.groups import Group, group_rank, tensor_parallel_group
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.engine.linear import LinearHead
from megatron_ext.head.engine.options import Cache, HeadOptions, Layout, Reduction, one_of
from megatron_ext.head.engine.token_results import Found, flat_labels, log_probs, reduced, refuse
from megatron_ext.head.validation import argument_checks


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: Group = None,
    hidden_layout: Layout = "replicated",
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
    skip_ignored: bool = False,
    loss_mask: Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """Cross entropy of `hidden @ weight.T` against `labels`, a chunk of logits at a time.

    The loss of a token is `(1 - e) nll - e mean_log_prob + z_loss lse^2` with e the label smoothing, as in
    `torch.nn.functional.cross_entropy`, over the whole vocabulary. Any per-token gradient may come back.

    Args:
        hidden: `[..., D]`; with the sequence layout this rank's equal slice of dim 0. fp32, bf16, fp16 or fp64.
        weight: `[V/R, D]`, this rank's vocabulary shard, of the same dtype (any under autocast).
        labels: `[...]`, integers: global token ids, of the full sequence in either layout.
        tp_group: the ranks that share the vocabulary; None: Megatron's tensor-parallel group where `parallel_state` is
            initialised, else no sharding.
        hidden_layout: "replicated": all ranks hold the same hidden states; "sequence": each its slice.
        bias: `[V/R]`, added to the logits. Columns with a bias of -inf do not count.
        vocab: this rank's columns; None: equal shards in rank order, all columns count.
        ignore_index: tokens with this label get 0 and no gradient.
        softcap, temperature: logits become `softcap * tanh(logits / softcap) / temperature`.
        reduction: "none", "sum", or "mean" over the tokens that count (0 if none does).
        cache: fraction in [0, 1] of the logits whose exponentials are kept for backward: `(8 - 2 * cache)` T V D / R
            FLOPs and `cache * T * V / R` elements of memory; from 1024 on: that many bytes at most. "bounded": as many
            eighths as take no more than the weight and its fp32 gradient, `min(1, 3 D / T)` in 16 bits; "auto": what
            fits into half of the memory that is free at the first call of a shape.
        chunk_tokens: tokens a chunk; None: chosen from the sizes. It changes memory and speed, not the result.
        skip_ignored: leave out the tokens that do not count before the first matmul. One host sync, dynamic shapes.
        loss_mask: `[...]`; losses are multiplied by it, and tokens where it is 0 do not count.
        gradient_accumulation_fusion: backward adds the weight gradient into `weight.main_grad`, by Megatron's protocol.

    Returns:
        `[...]` (a scalar if reduced), fp32 (fp64 for fp64), on every rank alike.

    Communicates, at R > 1: forward 1 collective, backward 1; with the sequence layout 2 and 2. None at R = 1.

    Raises:
        ValueError: an argument breaks its rule; the message says which, and the fix.
    """
    one_of("reduction", reduction, get_args(Reduction))
    loss = linear_parts(
        hidden,
        weight,
        labels,
        bias=bias,
        vocab=vocab,
        loss_mask=loss_mask,
        skip_ignored=skip_ignored,
        tp_group=tp_group,
        hidden_layout=hidden_layout,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        temperature=temperature,
        cache=cache,
        chunk_tokens=chunk_tokens,
        fuse_main_grad=gradient_accumulation_fusion,
    ).loss
    return reduced(loss, labels, loss_mask, ignore_index, reduction)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: Group = None,
    hidden_layout: Layout = "replicated",
    bias: Tensor | None = None,
    vocab: VocabShard | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    cache: Cache = "bounded",
    chunk_tokens: int | None = None,
    skip_ignored: bool = False,
    loss_mask: Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    return_entropy: bool = False,
    return_hits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probability of each label under `softmax(hidden @ weight.T)`, a chunk of logits at a time.

    Arguments, communication and errors as for `linear_cross_entropy`; a `loss_mask` only says which tokens count.

    Returns:
        `[...]`, fp32 (fp64 for fp64), 0 for tokens that do not count. With `return_entropy` and `return_hits` a tuple
        of it, the entropy of each token's distribution (fp32, differentiable too, 0 for tokens that do not count), and
        whether the label has the largest logit (bool; the lowest id wins among equals; False where it does not count).
    """
    found = linear_parts(
        hidden,
        weight,
        labels,
        bias=bias,
        vocab=vocab,
        loss_mask=loss_mask,
        skip_ignored=skip_ignored,
        tp_group=tp_group,
        hidden_layout=hidden_layout,
        ignore_index=ignore_index,
        softcap=softcap,
        temperature=temperature,
        cache=cache,
        chunk_tokens=chunk_tokens,
        fuse_main_grad=gradient_accumulation_fusion,
        entropy=return_entropy,
        hits=return_hits,
    )
    return log_probs(found)


def linear_parts(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None,
    vocab: VocabShard | None,
    loss_mask: Tensor | None,
    skip_ignored: bool,
    tp_group: Group,
    **chosen: Any,
) -> Found:
    group = tensor_parallel_group(tp_group)
    rows = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() else 1
    options = HeadOptions(group=group, vocab=argument_checks.shard_of(vocab, max(rows, 1), group), **chosen)
    argument_checks.check_floating("hidden", hidden)
    labels_T, fault = flat_labels(labels, loss_mask, options, vocab)
    in_slices = options.hidden_layout == "sequence"
    fault = argument_checks.layout_fault(hidden, labels, in_slices, options.ranks) or fault
    fault = argument_checks.linear_fault(hidden, weight, bias, vocab, options.ranks) or fault
    if options.fuse_main_grad and torch.is_grad_enabled():
        fault = fault or argument_checks.main_grad_fault(weight)
    sizes = [labels_T.shape[0] // options.ranks] * options.ranks if in_slices and options.ranks > 1 else None

    kept_T = mine_T = among = None
    if skip_ignored:
        counts_T = labels_T != options.ignore_index
        per_rank = counts_T.view(options.ranks if sizes else 1, -1)
        kept_T = counts_T.nonzero().squeeze(1)
        labels_T = labels_T[kept_T]
        mine_T = per_rank[group_rank(group) if sizes else 0].nonzero().squeeze(1)
        if sizes:
            sizes = per_rank.sum(1).tolist()
        else:
            among = (kept_T, labels.numel())

    kind = hidden.device.type
    narrow = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    x_TD = hidden.to(torch.get_autocast_dtype(kind) if narrow else hidden.dtype)
    x_TD = x_TD.reshape(hidden.shape[:-1].numel(), hidden.shape[-1])
    if fault is not None:
        refuse(fault, x_TD, labels.numel() if among else labels_T.shape[0], sizes, options)
    if mine_T is not None:
        x_TD = x_TD.index_select(0, mine_T)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    if weight.shape[0] == 0:  # one column that does not count is simpler than none
        nowhere = VocabShard(options.vocab.size, options.vocab.size + 1, options.vocab.size)
        options = dataclasses.replace(options, vocab=nowhere, fuse_main_grad=False)
        weight, bias = F.pad(weight, (0, 0, 0, 1)), None if bias is None else F.pad(bias, (0, 1))
    if options.fuse_main_grad:
        main_grad.promise(weight)
    results = LinearHead.apply(x_TD, weight, bias, labels_T, options, sizes, keep, among)
    if kept_T is not None:
        results = [None if x is None else x.new_zeros(labels.numel()).index_copy(0, kept_T, x) for x in results]
    return Found(*(None if x is None else x.reshape(labels.shape) for x in results))
