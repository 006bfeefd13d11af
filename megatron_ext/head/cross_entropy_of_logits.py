"""Cross entropy, log-probabilities and entropy of labels from vocabulary-parallel logits.

Shapes: `[...]` are the leading dims of the labels, D the hidden size, V the vocabulary, R the ranks of `tp_group`.
"""

from typing import Any, get_args

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, tensor_parallel_group
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.engine.flatten import Flat
from megatron_ext.head.engine.logits import LogitsHead
from megatron_ext.head.engine.options import HeadOptions, Reduction, one_of
from megatron_ext.head.engine.token_results import Found, flat_labels, log_probs, reduced, refuse
from megatron_ext.head.validation import argument_checks


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
            once then, and who needs the logits afterwards gets an error from autograd. Not into a leaf's memory.

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
    return reduced(loss, labels, loss_mask, ignore_index, reduction)


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
    return log_probs(found)


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
    argument_checks.check_floating("logits", logits)
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


def on_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab: VocabShard | None,
    loss_mask: Tensor | None,
    gradient_into_logits: bool,
    tp_group: Group,
    **chosen: Any,
) -> Found:
    group = tensor_parallel_group(tp_group)
    argument_checks.check_floating("logits", logits)
    columns = logits.shape[-1]
    options = HeadOptions(group=group, vocab=argument_checks.shard_of(vocab, max(columns, 1), group), **chosen)
    flat = Flat(logits)
    labels_T, fault = flat_labels(labels, loss_mask, options, vocab, flat.order)
    if logits.shape[:-1] != labels.shape or logits.device != labels.device:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} on {logits.device}, labels {tuple(labels.shape)} on "
            f"{labels.device}: labels must have the shape of logits without the last dim, on the same device"
        )
    fault = argument_checks.shard_fault(options.vocab, columns, "logits", options.ranks) or fault
    if fault is not None:
        refuse(fault, logits, labels_T.shape[0], None, options)
    z = flat.rows(logits)
    base = logits if logits._base is None else logits._base
    of_a_leaf = base.is_leaf and base.requires_grad  # whose values outlive backward
    own_memory = not of_a_leaf and all(stride or size == 1 for size, stride in zip(z.shape, z.stride(), strict=True))
    places_T = flat.places(z.device, options.ranks)
    results = LogitsHead.apply(z, labels_T, options, gradient_into_logits and own_memory, places_T)
    return Found(*(None if x is None else flat.up(x) for x in results))
