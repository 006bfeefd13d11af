"""From tokens to a number per token: the decoder, and our head on the shard of the lm head's weight. No logits.

Where a model does something to its logits that is not known here (`output_head`), they are made, and read in shards.

Whole sequences go in and whole results come out on every tensor- and context-parallel rank; padding, splitting and
joining happen here, so that context parallelism does not show outside.

Legend: B sequences, S tokens of each, P tokens of this rank, D hidden size, V vocabulary, R tensor-parallel ranks,
W context-parallel ranks.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.groups import UNSHARDED, group_size
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.dtensor.attention import sequence_hook
from megatron_ext.dtensor.decoder import output_head_path, text_model
from megatron_ext.dtensor.output_head import HeadRule, head_rule
from megatron_ext.head import (
    linear_cross_entropy,
    linear_log_probs,
    linear_sampled_log_probs,
    sampled_log_probs,
)
from megatron_ext.head.calls import token_log_probs, vocab_parallel_cross_entropy
from megatron_ext.head.checks import or_refuse
from megatron_ext.sequence.next_token import next_tokens
from megatron_ext.sequence.parts import SequenceParts

IGNORE_INDEX = -100
_HEAD = "_megatron_ext_head"  # the name of `_through_head` as a method of a sharded model
_RULE = "_megatron_ext_head_rule"


def register(model: nn.Module, rule: HeadRule | None) -> None:
    """Let FSDP2 gather the root's parameters for `_through_head` as it does for forward.

    Args:
        rule: `head_rule(model)` from before it was sharded.
    """
    model.__dict__[_RULE] = rule
    model.__dict__[_HEAD] = functools.partial(_through_head, model)
    register_fsdp_forward_method(model, _HEAD)


def causal_lm_loss(
    model: nn.Module,
    tokens_BS: Tensor,
    labels_BS: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    cache: Any = "auto",
    chunk_tokens: int | None = None,
) -> Tensor:
    """Cross entropy of every token of whole sequences, without holding logits where the model's head allows that.

    Args:
        model: what `_parallelize_model` made of a causal LM of transformers; or such a model as it is.
        tokens_BS: `[B, S]` token ids, the same on all tensor- and context-parallel ranks. Any S.
        labels_BS: `[B, S]`, the target of each position, -100 for none. None: the token after it in its sequence or
            document, none behind padding.
        attention_mask: `[B, S]`, 0 where a token is padding; behind the tokens it costs nothing, elsewhere a mask.
        cu_seqlens: integers `[documents + 1]`, B = 1: where packed documents begin, padding counted, and the last one
            ends, S. Under context parallelism each document's length must be a multiple of 2W.
        temperature, label_smoothing, z_loss, cache, chunk_tokens: as for `megatron_ext.linear_cross_entropy`.

    Returns:
        `[B, S]`, fp32, on every tensor- and context-parallel rank alike, 0 where there is no target. FSDP2 averages
        gradients over data- and context-parallel ranks, and each of the latter brings the gradient of the whole
        sequences: scale the loss as if there were data parallelism only.

    Communicates: beside the model, what `linear_cross_entropy` does; with context parallelism one all-gather of the
    result, backward one reduce-scatter.

    Raises:
        ValueError: arguments that don't fit each other. What the head refuses on one rank is raised on every one.

    Warns:
        Once a class of models: its logits are made, because what its forward does to them is not known here.
    """
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "chunk_tokens": chunk_tokens}
    read = Read(
        temperature,
        functools.partial(linear_cross_entropy, cache=cache, **options),
        functools.partial(vocab_parallel_cross_entropy, **options),
    )
    return _on_whole_sequences(model, read, tokens_BS, labels_BS, attention_mask, cu_seqlens)[0]


def causal_lm_log_probs(
    model: nn.Module,
    tokens_BS: Tensor,
    labels_BS: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float = 1.0,
    cache: Any = "auto",
    chunk_tokens: int | None = None,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probability of each position's target; arguments, communication and errors as for `causal_lm_loss`.

    Returns:
        `[B, S]`, fp32, 0 where there is no target; with `return_entropy` a tuple of it and the entropy of each
        position's distribution, differentiable too.
    """

    options: dict[str, Any] = {"chunk_tokens": chunk_tokens, "return_entropy": return_entropy}
    read = Read(
        temperature,
        functools.partial(linear_log_probs, cache=cache, **options),
        functools.partial(token_log_probs, **options),
    )
    found = _on_whole_sequences(model, read, tokens_BS, labels_BS, attention_mask, cu_seqlens)
    return found if return_entropy else found[0]


def get_logprobs_from_vocab_parallel_logits(vocab_parallel_logits: Tensor, input_ids: Tensor) -> Tensor:
    """Log-probabilities of the next tokens from the logits that a parallelized model's forward returns.

    Args:
        vocab_parallel_logits: `[B, S, V]`, a DTensor sharded along V over a 1-D mesh, evenly or not; or whole.
        input_ids: `[B, S]`, whole and unshifted.

    Returns:
        `[B, S - 1]`, fp32, differentiable. Communicates one collective at several ranks; backward none.
    """
    logits, group, vocab = _local(vocab_parallel_logits, -1)
    log_probs = token_log_probs(logits[:, :-1], input_ids[:, 1:], group, vocab=vocab)
    assert isinstance(log_probs, Tensor)
    return log_probs


def causal_lm_sampled_log_probs(
    model: nn.Module,
    tokens_BS: Tensor,
    *,
    top_k: int | None,
    top_p: float,
    cu_seqlens: Tensor | None = None,
    temperature: float = 1.0,
    with_plain: bool = False,
) -> tuple[Tensor, ...]:
    """Log-probability of each position's next token under the distribution that top-k and top-p leave of the model's.

    Without logits where the head is a matrix alone; else, of a softcap or a bias, through logits. Arguments,
    communication and errors as for `causal_lm_log_probs` and `megatron_ext.head.sampled_log_probs`.

    Returns:
        `[B, S]`, fp32, -inf where the token is not kept, 0 where there is none; with `with_plain` beside it the
        log-probabilities under the whole distribution.
    """

    def both(sampled: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(*inputs: Tensor, bias: Any = None, softcap: Any = None, **options: Any) -> tuple[Any, ...]:
            found = (sampled(*inputs, top_k=top_k, top_p=top_p, **options),)
            return (*found, plain(*inputs, **options)) if with_plain else found

        return read

    fused, unfused = both(linear_sampled_log_probs, linear_log_probs), both(sampled_log_probs, token_log_probs)
    read = Read(temperature, fused, unfused, 1 + with_plain)
    return _on_whole_sequences(model, read, tokens_BS, None, None, cu_seqlens, _PLAIN)


def causal_lm_from_logits(
    model: nn.Module,
    tokens_BS: Tensor,
    read: Callable[..., Tensor],
    *,
    columns: int,
    cu_seqlens: Tensor | None = None,
    beside: Tensor | None = None,
) -> Tensor:
    """What `read` makes of the logits of whole sequences: for what the fused head has no function for.

    Args:
        read: called with this rank's part of the logits, `[B, P, V/R]`, and of `beside`, and by their names `tp_group`
            and `vocab`; gives `[B, P, columns]`, the same on all ranks of `tp_group`. Differentiable.
        columns: how many numbers it gives of each position.
        beside: `[B, S, ...]`, what it needs of each position.

    Returns:
        `[B, S, columns]`. Communicates and raises as `causal_lm_loss`.
    """

    def of_logits(logits: Tensor, labels: Tensor, beside_BP: Tensor | None, temperature: float, **shard: Any) -> Tensor:
        return read(logits, beside_BP, **shard)

    made = Read(1.0, None, of_logits, columns=(columns,))
    return _on_whole_sequences(model, made, tokens_BS, None, None, cu_seqlens, _LOGITS, beside)[0]


# Which heads `_on_whole_sequences` reads from hidden states: all that are known, those that are a matrix, none.
_KNOWN, _PLAIN, _LOGITS = "known", "plain", "logits"


class Read(NamedTuple):
    """A function of the fused head, and the same of logits; both take a temperature.

    They give `results` tensors, each a number of a position, or `columns` numbers.
    """

    temperature: float
    hidden: Callable[..., Any] | None
    logits: Callable[..., Any]
    results: int = 1
    columns: tuple[int, ...] = ()

    def shape(self, labels_BP: Tensor) -> tuple[int, ...]:
        """That of the results together."""
        return (self.results, *labels_BP.shape, *self.columns)


def _on_whole_sequences(
    model: nn.Module,
    read: Read,
    tokens_BS: Tensor,
    labels_BS: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    fused: str = _KNOWN,
    beside: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """`beside`: with `_LOGITS`, what the function needs of each position."""
    hook = sequence_hook(model)
    through_head = getattr(model, _HEAD, functools.partial(_through_head, model))
    rule = model.__dict__[_RULE] if _RULE in model.__dict__ else head_rule(model)
    if hook is None and cu_seqlens is not None:
        raise ValueError("cu_seqlens: transformers' own attention does not take them; call use_attention(model) first")
    cp_group, slices = (None, 1) if hook is None else (hook.cp_group, hook.slices)
    _check(tokens_BS, labels_BS, attention_mask, cu_seqlens)
    if labels_BS is None:
        labels_BS = next_tokens(tokens_BS, cu_seqlens)
        if attention_mask is not None:
            labels_BS = labels_BS.masked_fill(F.pad(attention_mask[:, 1:], (0, 1)) == 0, IGNORE_INDEX)

    ranks, length = group_size(cp_group), tokens_BS.shape[1]
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
    tokens_BP, labels_BP = parts.split(tokens_BS, 1), parts.split(labels_BS, 1)
    if rule is None and fused == _KNOWN:
        _say_once(type(model).__name__.removeprefix("FSDP"))
    if fused == _LOGITS:
        given = None if beside is None else parts.split(F.pad(beside, (0, 0, 0, padding)), 1)
        own = read._replace(logits=functools.partial(read.logits, beside_BP=given))
        found, fault = _through_logits(model, own, tokens_BP, labels_BP, **inputs)
    elif rule is None or (fused == _PLAIN and not _is_plain(model, rule)):
        found, fault = _through_logits(model, read, tokens_BP, labels_BP, **inputs)
    else:
        found, fault = through_head(rule, read, tokens_BP, labels_BP, **inputs)
    return tuple(parts.gather_or_refuse(x, 1, fault)[:, :length] for x in found)


def _check(
    tokens_BS: Tensor, labels_BS: Tensor | None, attention_mask: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    if tokens_BS.dim() != 2 or tokens_BS.is_floating_point():
        raise ValueError(f"tokens are {tokens_BS.dtype} {list(tokens_BS.shape)}: they must be integers [batch, tokens]")
    for name, x in (("labels", labels_BS), ("attention_mask", attention_mask)):
        if x is not None and x.shape != tokens_BS.shape:
            raise ValueError(
                f"{name} has shape {list(x.shape)}: it must be that of the tokens, {list(tokens_BS.shape)}"
            )
    if cu_seqlens is not None and (tokens_BS.shape[0] != 1 or attention_mask is not None):
        masked = "" if attention_mask is None else " and an attention_mask"
        raise ValueError(
            f"cu_seqlens with a batch of {tokens_BS.shape[0]}{masked}: packed documents lie in one row, and padding is "
            f"a document of its own; pass tokens [1, S] alone"
        )


@functools.cache
def _say_once(model: str) -> None:
    warnings.warn(
        f"what {model} does to its logits is not known here: log-probabilities come through its logits, which takes "
        f"memory of the vocabulary's size for each token",
        stacklevel=2,
    )


def _through_logits(
    model: nn.Module, read: Read, tokens_BP: Tensor, labels_BP: Tensor, **inputs: Any
) -> tuple[tuple[Tensor, ...], ValueError | None]:
    """As `_through_head`, by way of the logits that the model makes."""
    logits, group, vocab = _local(model(input_ids=tokens_BP, **inputs).logits, -1)
    return or_refuse(
        lambda: _tuple(read.logits(logits, labels_BP, tp_group=group, vocab=vocab, temperature=read.temperature)),
        read.shape(labels_BP),
        logits,
    )


def _is_plain(model: nn.Module, rule: HeadRule) -> bool:
    """Whether logits are a product with the head's weight, over a number."""
    head: Any = model.get_submodule(output_head_path(model))
    return rule.softcap is None and head.bias is None


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _through_head(
    model: nn.Module, rule: HeadRule, read: Read, tokens_BP: Tensor, labels_BP: Tensor, **inputs: Any
) -> tuple[tuple[Tensor, ...], ValueError | None]:
    """What `read` makes of the hidden states of these tokens, `[B, P]` each, and what it refuses: see `or_refuse`."""
    text = text_model(model)
    hidden = text(input_ids=tokens_BP, **inputs)[0]
    head: Any = model.get_submodule(output_head_path(model))
    weight, group, vocab = _local(head.weight, 0)
    if isinstance(hidden, DTensor):
        hidden = hidden.to_local()
    in_slices = hidden.shape[1] != tokens_BP.shape[1]
    if in_slices and group is UNSHARDED:
        raise ValueError("the residual stream is sharded and the lm head is not; shard both in custom_parallel_plan")
    # The head's "sequence" layout has slices of dim 0.
    if in_slices:
        hidden, labels_BP = hidden.transpose(0, 1), labels_BP.t()
    fused = read.hidden
    assert fused is not None
    found, fault = or_refuse(
        lambda: _tuple(
            fused(
                hidden.to(weight.dtype),
                weight,
                labels_BP,
                tp_group=group,
                hidden_layout="sequence" if in_slices else "replicated",
                bias=None if head.bias is None else _local(head.bias, 0)[0],
                vocab=vocab,
                softcap=rule.softcap,
                temperature=read.temperature / rule.scale,
            )
        ),
        read.shape(labels_BP),
        weight,
    )
    # FSDP2 hangs its backward hook on these, and warns that a view can lose it.
    return tuple((x.t() if in_slices else x).clone() for x in found), fault


def _local(x: Tensor, dim: int) -> tuple[Tensor, Any, VocabShard]:
    """This rank's shard of `x`, the group that shares its vocabulary (dim `dim`), and which columns these are."""
    size = x.shape[dim]
    if not isinstance(x, DTensor) or not x.placements[-1].is_shard(dim % x.dim()):
        local = x.to_local() if isinstance(x, DTensor) else x
        return local, UNSHARDED, VocabShard(0, size, size)
    if x.device_mesh.ndim != 1:
        raise ValueError(
            f"a DTensor on mesh {x.device_mesh}: its mesh must be 1-D, the tensor-parallel ranks; pass a shard"
        )
    longest = -(-size // x.device_mesh.size())  # DTensor cuts as torch.chunk does
    start = min(longest * x.device_mesh.get_local_rank(), size)
    return x.to_local(), x.device_mesh.get_group(), VocabShard(start, min(start + longest, size), size)
