"""The head's public functions: arguments are checked, made flat, and given to the engine; results get their shape back.

Shapes: `[...]` are the leading dims of the labels, D the hidden size, V the vocabulary, R the ranks of `tp_group`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group, group_rank, tensor_parallel_group
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head import checks, statistics
from megatron_ext.head.flat import Flat
from megatron_ext.head.linear import LinearHead
from megatron_ext.head.logits import LogitsHead
from megatron_ext.head.options import Cache, HeadOptions, Layout, Reduction, one_of
from megatron_ext.head.rows import accumulation_dtype


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
    cache: Cache = "auto",
    chunk_tokens: int | None = None,
    skip_ignored: bool = False,
    loss_mask: Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """Cross entropy of `hidden @ weight.T` against `labels`, without ever holding the logits.

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
            FLOPs and `cache * T * V / R` elements of memory; above 1: that many bytes at most; "auto": by free memory.
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
    return _reduced(loss, labels, loss_mask, ignore_index, reduction)


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
    cache: Cache = "auto",
    chunk_tokens: int | None = None,
    skip_ignored: bool = False,
    loss_mask: Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    return_entropy: bool = False,
    return_hits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probability of each label under `softmax(hidden @ weight.T)`, without ever holding the logits.

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
    return _log_probs(found)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
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
        logits: `[..., V/R]`, this rank's columns, any floating dtype. -inf columns of a token do not count.
        labels: `[...]`, integers: global token ids.
        gradient_into_logits: backward writes the gradient into the memory of `logits` instead of new memory; it runs
            once then, and who needs the logits afterwards gets an error from autograd.

    The other arguments, the result and the errors as for `linear_cross_entropy`. Nothing of vocabulary size is saved
    beside the logits. The gradient has the logits' dtype.

    Communicates: forward 1 collective at R > 1, backward none.
    """
    one_of("reduction", reduction, get_args(Reduction))
    loss = on_logits(
        logits,
        labels,
        vocab=vocab,
        loss_mask=loss_mask,
        gradient_into_logits=gradient_into_logits,
        tp_group=tp_group,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    ).loss
    return _reduced(loss, labels, loss_mask, ignore_index, reduction)


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
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

    Arguments, communication and errors as for `vocab_parallel_cross_entropy`, results as for `linear_log_probs`.
    """
    found = on_logits(
        logits,
        labels,
        vocab=vocab,
        loss_mask=loss_mask,
        gradient_into_logits=gradient_into_logits,
        tp_group=tp_group,
        ignore_index=ignore_index,
        softcap=softcap,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy=return_entropy,
        hits=return_hits,
    )
    return _log_probs(found)


def token_entropy(
    logits: Tensor,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
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
    checks.check_floating("logits", logits)
    found = on_logits(
        logits,
        torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device),
        vocab=vocab,
        loss_mask=None,
        gradient_into_logits=gradient_into_logits,
        tp_group=tp_group,
        softcap=softcap,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy=True,
    )
    assert found.entropy is not None
    return found.entropy


class _Found(NamedTuple):
    """Per-token results, shaped as the labels."""

    loss: Any
    entropy: Any
    hits: Any
    z_loss: Any


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
) -> _Found:
    group = tensor_parallel_group(tp_group)
    rows = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() else 1
    options = HeadOptions(group=group, vocab=checks.shard_of(vocab, max(rows, 1), group), **chosen)
    checks.check_floating("hidden", hidden)
    labels_T, fault = _labels(labels, loss_mask, options, vocab)
    in_slices = options.hidden_layout == "sequence"
    fault = checks.layout_fault(hidden, labels, in_slices, options.ranks) or fault
    fault = checks.linear_fault(hidden, weight, bias, vocab, options.ranks) or fault
    if options.fuse_main_grad and torch.is_grad_enabled():
        fault = fault or checks.main_grad_fault(weight)
    sizes = [labels_T.shape[0] // options.ranks] * options.ranks if in_slices and options.ranks > 1 else None

    kept_T = mine_T = None
    if skip_ignored:
        counts_T = labels_T != options.ignore_index
        per_rank = counts_T.view(options.ranks if sizes else 1, -1)
        kept_T = counts_T.nonzero().squeeze(1)
        labels_T = labels_T[kept_T]
        mine_T = per_rank[group_rank(group) if sizes else 0].nonzero().squeeze(1)
        sizes = per_rank.sum(1).tolist() if sizes else None

    kind = hidden.device.type
    narrow = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    x_TD = hidden.to(torch.get_autocast_dtype(kind) if narrow else hidden.dtype)
    x_TD = x_TD.reshape(hidden.shape[:-1].numel(), hidden.shape[-1])
    if fault is not None:
        _refuse(fault, x_TD, labels_T.shape[0], sizes, options)
    if mine_T is not None:
        x_TD = x_TD.index_select(0, mine_T)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    if weight.shape[0] == 0:  # one column that does not count is simpler than none
        nowhere = VocabShard(options.vocab.size, options.vocab.size + 1, options.vocab.size)
        options = dataclasses.replace(options, vocab=nowhere, fuse_main_grad=False)
        weight, bias = F.pad(weight, (0, 0, 0, 1)), None if bias is None else F.pad(bias, (0, 1))
    if options.fuse_main_grad:
        main_grad.promise(weight)
    results = LinearHead.apply(x_TD, weight, bias, labels_T, options, sizes, keep)
    if kept_T is not None:
        results = [None if x is None else x.new_zeros(labels.numel()).index_copy(0, kept_T, x) for x in results]
    return _Found(*(None if x is None else x.reshape(labels.shape) for x in results))


def on_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab: VocabShard | None,
    loss_mask: Tensor | None,
    gradient_into_logits: bool,
    tp_group: Group,
    **chosen: Any,
) -> _Found:
    group = tensor_parallel_group(tp_group)
    checks.check_floating("logits", logits)
    columns = logits.shape[-1]
    options = HeadOptions(group=group, vocab=checks.shard_of(vocab, max(columns, 1), group), **chosen)
    flat = Flat(logits)
    labels_T, fault = _labels(labels, loss_mask, options, vocab, flat.order)
    if logits.shape[:-1] != labels.shape or logits.device != labels.device:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} on {logits.device}, labels {tuple(labels.shape)} on "
            f"{labels.device}: labels must have the shape of logits without the last dim, on the same device"
        )
    fault = checks.shard_fault(options.vocab, columns, "logits", options.ranks) or fault
    if fault is not None:
        _refuse(fault, logits, labels_T.shape[0], None, options)
    z = flat.rows(logits)
    own_memory = all(stride or size == 1 for size, stride in zip(z.shape, z.stride(), strict=True))
    places_T = flat.places(z.device, options.ranks)
    results = LogitsHead.apply(z, labels_T, options, gradient_into_logits and own_memory, places_T)
    return _Found(*(None if x is None else flat.up(x) for x in results))


def _labels(
    labels: Tensor,
    loss_mask: Tensor | None,
    options: HeadOptions,
    vocab: VocabShard | None,
    order: Sequence[int] | None = None,
) -> tuple[Tensor, ValueError | None]:
    """The labels as `[T]`, the masked ones ignored, their dims in the order given; and what only this rank may see."""
    fault = checks.size_fault(vocab, checks.check_labels, labels, options.ignore_index, size=options.vocab.size)
    labels = labels.long()
    if loss_mask is not None:
        checks.check_same_shape("loss_mask", loss_mask, labels)
        labels = labels.masked_fill(loss_mask == 0, options.ignore_index)
    return (labels if order is None or len(order) != labels.dim() else labels.permute([*order])).reshape(-1), fault


def _refuse(fault: ValueError, like: Tensor, tokens: int, sizes: list[int] | None, options: HeadOptions) -> None:
    """Raises `fault` once the other ranks know of it, by the exchange that they are waiting for."""
    if options.ranks > 1 and tokens:
        if sizes is not None:
            piece = like.new_zeros(sizes[group_rank(options.group)], like.shape[-1])
            collectives.all_gather(piece, options.group, sizes=sizes)
        statistics.refuse(tokens, options, accumulation_dtype(like.dtype), like.device)
    raise fault


def _log_probs(found: _Found) -> Tensor | tuple[Tensor, ...]:
    results = (0.0 - found.loss, found.entropy, found.hits)  # a minus sign alone would make -0.0 of an ignored token
    chosen = tuple(x for x in results if x is not None)
    return chosen if len(chosen) > 1 else chosen[0]


def _reduced(loss: Tensor, labels: Tensor, loss_mask: Tensor | None, ignore_index: int, reduction: Reduction) -> Tensor:
    if loss_mask is not None:
        loss = loss * loss_mask.to(loss.dtype)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    kept = labels != ignore_index
    weight = (kept if loss_mask is None else kept * loss_mask).sum(dtype=loss.dtype)
    return loss.sum() / weight.where(weight != 0, 1.0)
