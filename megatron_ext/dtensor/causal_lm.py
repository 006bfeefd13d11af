"""Losses and other numbers per token from token ids: the model's decoder, then our head on its lm head's weight.

Every tensor- and context-parallel rank passes whole sequences and gets whole results; sequences are padded, split and
joined here, so that callers need not know of context parallelism.

Legend: B sequences, S tokens of each, P tokens of this rank, D hidden size, V vocabulary, R tensor-parallel ranks,
W context-parallel ranks.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.distributed.groups import group_size
from megatron_ext.dtensor.attention import sequence_hook
from megatron_ext.dtensor.decoder import embedding, require_model
from megatron_ext.dtensor.output.hidden_states_or_logits import read_out
from megatron_ext.dtensor.output.reads import Read
from megatron_ext.dtensor.sequence_arguments import token_id_fault
from megatron_ext.head import (
    LmHead,
    Logits,
    LogProbs,
    ReadOut,
    Sampled,
    linear_cross_entropy,
    linear_log_probs,
    token_log_probs,
    vocab_parallel_cross_entropy,
)
from megatron_ext.head.checks import Bits, Cache, token_bound
from megatron_ext.head.cross_entropy import side_by_side
from megatron_ext.head.layer_facts import local_shard
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from megatron_ext.sequence.next_token import next_tokens

IGNORE_INDEX = -100


def causal_lm_loss(
    model: nn.Module,
    tokens_BS: Tensor,
    *,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    cache: Cache = "bounded",
    chunk_tokens: int | None = None,
    skip_ignored: bool | int = False,
    bits: Bits | None = None,
    logit_dtype: torch.dtype | None = None,
) -> Tensor:
    """Cross entropy of every token of whole sequences, without logits if the model's head allows that.

    Args:
        model: a causal language model of transformers, as it is or from `parallelize`.
        tokens_BS: `[B, S]` token ids, the same on all tensor- and context-parallel ranks. Any S.
        labels: `[B, S]` as in transformers: the tokens themselves, -100 where a token is no target. They are shifted
            here: the target of a position is the next label in its sequence or document. None: the tokens, except
            padding, and except the first token after padding at the start of a row.
        shift_labels: `[B, S]`, the target of each position, -100 for none; instead of `labels`, if they are shifted
            already (transformers' name for such labels).
        attention_mask: `[B, S]`, 0 where a token is padding. Padding at the end of rows costs nothing; padding
            elsewhere makes attention run with a mask.
        cu_seqlens: integers `[documents + 1]`, B = 1: where packed documents begin, padding counted, and S at last.
            Under context parallelism each document's length must be a multiple of 2W.
        temperature, label_smoothing, z_loss, cache, chunk_tokens, skip_ignored, bits, logit_dtype: as for
            `megatron_ext.linear_cross_entropy`. A number as `skip_ignored` bounds the tokens of one rank's part.

    Returns:
        `[B, S]`, fp32, the same on every tensor- and context-parallel rank, 0 where there is no target. FSDP2 averages
        gradients over data- and context-parallel ranks, and each context-parallel rank contributes the gradient of the
        whole sequences: scale the loss as if there were only data parallelism.

    Communicates: beside the model, what `linear_cross_entropy` does; with context parallelism one all-gather of the
    result, backward one reduce-scatter.

    Raises:
        ValueError: arguments that do not fit each other, or token ids outside of the vocabulary (on CUDA these stop the
            device). A refusal of the head on one rank is raised on every rank.

    Warns:
        UserWarning: once a class of models: its logits are made, because the result from hidden states differs from
            the result from logits, and by how much; or because it has hooks, which would not run without logits.
    """
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "chunk_tokens": chunk_tokens}
    read = Read(
        temperature,
        functools.partial(linear_cross_entropy, cache=cache, skip_ignored=skip_ignored, **options),
        functools.partial(vocab_parallel_cross_entropy, **options),
        bits=bits,
        logit_dtype=logit_dtype,
    )
    return _on_whole_sequences(model, read, tokens_BS, labels, shift_labels, attention_mask, cu_seqlens)[0]


def causal_lm_log_probs(
    model: nn.Module,
    tokens_BS: Tensor,
    *,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float = 1.0,
    cache: Cache = "bounded",
    chunk_tokens: int | None = None,
    return_entropy: bool = False,
    skip_ignored: bool | int = False,
    bits: Bits | None = None,
    logit_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probability of each position's target; arguments, communication and errors as for `causal_lm_loss`.

    Returns:
        `[B, S]`, fp32, 0 where there is no target; with `return_entropy` a tuple of log-probabilities and the entropy
        of each position's distribution, `[B, S]`, differentiable too.
    """

    options: dict[str, Any] = {"chunk_tokens": chunk_tokens, "return_entropy": return_entropy}
    read = Read(
        temperature,
        functools.partial(linear_log_probs, cache=cache, skip_ignored=skip_ignored, **options),
        functools.partial(token_log_probs, **options),
        bits=bits,
        logit_dtype=logit_dtype,
    )
    found = _on_whole_sequences(model, read, tokens_BS, labels, shift_labels, attention_mask, cu_seqlens)
    return found if return_entropy else found[0]


def get_logprobs_from_vocab_parallel_logits(vocab_parallel_logits: Tensor, input_ids: Tensor) -> Tensor:
    """Log-probabilities of the next tokens from the logits that a parallelized model's forward returns.

    Args:
        vocab_parallel_logits: `[B, S, V]`, a DTensor sharded along V over a 1-D mesh, evenly or not; or a whole tensor.
        input_ids: `[B, S]`, whole and unshifted.

    Returns:
        `[B, S - 1]`, fp32, differentiable. Communicates one collective at several ranks; backward none.
    """
    logits, group, vocab = local_shard(vocab_parallel_logits, -1)
    return cast(Tensor, token_log_probs(logits[:, :-1], input_ids[:, 1:], group, vocab=vocab))


def causal_lm_sampled_log_probs(
    model: nn.Module,
    tokens_BS: Tensor,
    *,
    top_k: int | None,
    top_p: float,
    cu_seqlens: Tensor | None = None,
    temperature: float = 1.0,
    with_plain: bool = False,
    bits: Bits | None = None,
    logit_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Log-probability of each position's next token under the model's distribution after top-k and top-p filters.

    Arguments, communication and errors as for `causal_lm_log_probs` and `megatron_ext.head.sampled_log_probs`.

    Returns:
        A tuple of `[B, S]`, fp32, -inf where the filters drop the token, 0 where there is none; with `with_plain` also
        the log-probabilities under the whole distribution, from the same pass over the logits.
    """

    def readouts(labels: Tensor) -> list[ReadOut]:
        return [Sampled(labels, top_k, top_p), *([LogProbs(labels)] if with_plain else [])]

    found = causal_lm_read(
        model,
        tokens_BS,
        readouts,
        columns=1 + with_plain,
        cu_seqlens=cu_seqlens,
        temperature=temperature,
        bits=bits,
        logit_dtype=logit_dtype,
    )
    return found.unbind(-1)


def causal_lm_read(
    model: nn.Module,
    tokens_BS: Tensor,
    readouts: Callable[..., Sequence[ReadOut]],
    *,
    columns: int,
    cu_seqlens: Tensor | None = None,
    beside: Tensor | None = None,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    skip_ignored: bool | int = False,
    bits: Bits | None = None,
    logit_dtype: torch.dtype | None = None,
) -> Tensor:
    """Any read-outs of `megatron_ext.head` of whole sequences, in one pass over the head, without logits if possible.

    Args:
        readouts: a function of the label of each position (its next token, or -100) and of `beside`, if given, both in
            the head's order of tokens, that returns the read-outs.
        columns: how many numbers the read-outs together give for each position.
        beside: `[B, S, K]`, further inputs of `readouts` for each position.
        labels, skip_ignored, bits, logit_dtype: as for `causal_lm_loss`; with `skip_ignored` results are 0 where a
            label is -100.

    Returns:
        `[B, S, columns]`, fp32, the results side by side, token ids as numbers. Communicates and raises what
        `causal_lm_loss` and the read-outs do.
    """

    def fused(hidden: Tensor, weight: Tensor, *given: Tensor, **facts: Any) -> Tensor:
        counts = given[0] != IGNORE_INDEX if skip_ignored else None
        found = LmHead(weight, **facts).read(
            hidden, *readouts(*given), counts=counts, at_most=token_bound(skip_ignored)
        )
        return side_by_side(found, given[0].dim())

    def unfused(logits: Tensor, *given: Tensor, **facts: Any) -> Tensor:
        found = side_by_side(Logits(logits, **facts).read(*readouts(*given)), given[0].dim())
        return found.where((given[0] != IGNORE_INDEX).unsqueeze(-1), 0.0) if skip_ignored else found

    read = Read(temperature, fused, unfused, columns=(columns,), bits=bits, logit_dtype=logit_dtype)
    return _on_whole_sequences(model, read, tokens_BS, labels, cu_seqlens=cu_seqlens, beside=beside)[0]


def causal_lm_from_logits(
    model: nn.Module,
    tokens_BS: Tensor,
    read: Callable[..., Tensor],
    *,
    columns: int,
    cu_seqlens: Tensor | None = None,
    beside: Tensor | None = None,
) -> Tensor:
    """Numbers that `read` computes from the logits of whole sequences, if the fused head has no function for them.

    Args:
        read: a differentiable function of this rank's logits `[B, P, V/R]`, this rank's part of `beside` (or None), and
            the keywords `tp_group` and `vocab`, that returns `[B, P, columns]`, the same on all ranks of `tp_group`.
        columns, beside: as for `causal_lm_read`; `beside` may be `[B, S, ...]`.

    Returns:
        `[B, S, columns]`. Communicates and raises what `causal_lm_loss` does.
    """

    def of_logits(logits: Tensor, labels: Tensor, *beside: Tensor, temperature: float, **shard: Any) -> Tensor:
        return read(logits, *(beside or (None,)), **shard)

    made = Read(1.0, None, of_logits, columns=(columns,))
    return _on_whole_sequences(model, made, tokens_BS, cu_seqlens=cu_seqlens, beside=beside)[0]


def _on_whole_sequences(
    model: nn.Module,
    read: Read,
    tokens_BS: Tensor,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    beside: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Apply `read` to whole sequences. `beside`: `[B, S, K]`, inputs of `read` beside the label of each position."""
    require_model(model)
    hook = sequence_hook(model)
    if hook is None and cu_seqlens is not None:
        raise ValueError("cu_seqlens: transformers' own attention does not take them; call use_attention(model) first")
    cp_group, slices = (None, 1) if hook is None else (hook.cp_group, hook.slices)
    _check(tokens_BS, {"labels": labels, "shift_labels": shift_labels, "attention_mask": attention_mask}, cu_seqlens)
    labels_BS = shift_labels
    if labels_BS is None:
        labels_BS = next_tokens(tokens_BS if labels is None else labels, cu_seqlens)
        if labels is None and attention_mask is not None:
            left_out = attention_mask == 0  # padding, which is neither predicted nor predicts a token
            labels_BS = labels_BS.masked_fill(F.pad(left_out[:, 1:], (0, 1)) | left_out, IGNORE_INDEX)
    ranks, length = group_size(cp_group), tokens_BS.shape[1]
    # With the hook of `use_attention` and one context-parallel rank, the hook checks token ids.
    fault = token_id_fault(embedding(model), tokens_BS) if hook is None or ranks > 1 else None
    if fault is not None and hook is None:
        raise fault
    if fault is not None:
        # The other ranks may have valid tokens, and wait in the model. So the model runs here too, with any tokens, and
        # the head refuses the labels, which tells the other ranks.
        tokens_BS = torch.zeros_like(tokens_BS)
        labels_BS = labels_BS.masked_fill(labels_BS != IGNORE_INDEX, -1)

    padding = -length % math.lcm(2 * ranks if ranks > 1 else 1, ranks * slices)
    tokens_BS = F.pad(tokens_BS, (0, padding))
    labels_BS = F.pad(labels_BS, (0, padding), value=IGNORE_INDEX)
    if attention_mask is not None:
        attention_mask = F.pad(attention_mask, (0, padding))
    if cu_seqlens is not None and padding:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + padding])
    parts = SequenceParts(cp_group, cu_seqlens)
    inputs = {"attention_mask": attention_mask, "use_cache": False}
    if cu_seqlens is not None:
        inputs["cu_seqlens"] = cu_seqlens
    given_BS = [labels_BS] if beside is None else [labels_BS, F.pad(beside, (0, 0, 0, padding))]
    given_BP = [parts.split(x, 1) for x in given_BS]
    found, refused = read_out(model, read, parts.split(tokens_BS, 1), given_BP, **inputs)
    return tuple(parts.gather_or_refuse(x, 1, fault or refused)[:, :length] for x in found)


def _check(tokens_BS: Tensor, given: dict[str, Tensor | None], cu_seqlens: Tensor | None) -> None:
    for name, x in {"tokens": tokens_BS, **given}.items():
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(
                f"{name} is a {type(x).__name__}: it must be a tensor [batch, tokens]; from a tokenizer's batch pass "
                f"batch['input_ids'], and attention_mask=batch['attention_mask']"
            )
    if tokens_BS.dim() != 2 or tokens_BS.is_floating_point():
        raise ValueError(f"tokens are {tokens_BS.dtype} {list(tokens_BS.shape)}: they must be integers [batch, tokens]")
    if given["labels"] is not None and given["shift_labels"] is not None:
        raise ValueError(
            "labels and shift_labels are both given: pass one, tokens as labels or targets as shift_labels"
        )
    for name, x in given.items():
        if x is not None and x.shape != tokens_BS.shape:
            raise ValueError(
                f"{name} has shape {list(x.shape)}: it must be that of the tokens, {list(tokens_BS.shape)}"
            )
    if cu_seqlens is not None and (tokens_BS.shape[0] != 1 or given["attention_mask"] is not None):
        masked = "" if given["attention_mask"] is None else " and an attention_mask"
        raise ValueError(
            f"cu_seqlens with a batch of {tokens_BS.shape[0]}{masked}: packed documents lie in one row, and padding is "
            f"a document of its own; pass tokens [1, S] alone"
        )
