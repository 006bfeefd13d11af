"""NeMo-RL's entry points from hidden states: log-probabilities without logits.

Legend: B sequences, S tokens of each, D hidden size, V vocabulary, R tensor-parallel and W context-parallel ranks; in
packs T tokens of N documents.
"""

import functools
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from megatron_ext import head
from megatron_ext.distributed.groups import Group, VocabShard, check_group, group_size
from megatron_ext.head.checks import Bits, Cache, HiddenLayout, check_option, filters, one_of
from megatron_ext.model_utils.arguments import (
    check_call,
    check_dims,
    chunk_tokens,
    number,
    padding_ignored,
    sampling_of,
    saving,
    shard,
    whole_if_none,
    whole_results,
)
from megatron_ext.model_utils.functions import PlainFunction
from megatron_ext.sequence.targets import PackedTargets, PaddedTargets, Targets


def _in_either_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `function` take positional arguments in the order of earlier versions of NeMo-RL too.

    There `output_weight` stood before `runtime_gather_output`, today's third; `target` followed. A weight in the third
    place, or no tensor where today's `target` stands, shows the earlier order.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        earlier = len(args) > 2 and (isinstance(args[2], Tensor) or (len(args) > 3 and not isinstance(args[3], Tensor)))
        if earlier:
            kwargs = {"output_weight": args[2], **kwargs}
            args = args[:2] + args[3:]
        return function(*args, **kwargs)

    return call


@_in_either_order
def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor | None,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Group,
    inference_only: bool = False,
    cp_group: Group = None,
    chunk_size: int | None = None,
    *,
    output_weight: Tensor | None = None,
    hidden_layout: HiddenLayout = "sequence",
    sampling_params: Any = None,
    return_entropy: bool = False,
    cu_seqlens_padded: Tensor | None = None,
    unpacked_seqlen: int = 0,
    cu_seqlens: Tensor | None = None,
    cache: Cache = "bounded",
    gradient_accumulation_fusion: bool = False,
    skip_ignored: bool | int = False,
    bits: Bits | None = None,
    logit_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute log-probabilities of next tokens from hidden states and the lm head's weight, without whole logits.

    Args:
        tensor_parallel_hidden_states: `[S/W/R, B, D]`, this rank's slice under sequence parallelism; `[S/W, B, D]` with
            `hidden_layout="replicated"`.
        output_weight_layer: `[V/R, D]`, the weight of the lm head, the embedding's where they are tied.
        runtime_gather_output: without effect: there are no logits to gather.
        target: `[B, S]`, the token ids themselves, whole; they are shifted inside. -100 and -1 give 0.
        vocab_start_index, vocab_end_index, tp_group, inference_only, cp_group, chunk_size: as for
            `from_parallel_logits_to_logprobs`.
        output_weight: if given, replaces `output_weight_layer`. By position it is the third argument, as in earlier
            versions of NeMo-RL: the types of the arguments tell the two orders apart.
        hidden_layout: "sequence": each tensor-parallel rank holds its slice; "replicated": each holds all.
        sampling_params: temperature, by which the logits are divided, top-k and top-p: an object like
            `TrainingSamplingParams`.
        return_entropy: also return the entropy of each distribution, of the same pass; not with top-k or top-p.
        cu_seqlens_padded, unpacked_seqlen, cu_seqlens: for a pack: B is 1, `target` `[1, T]`. As for
            `from_parallel_logits_to_logprobs_packed_sequences`.
        cache: how much of forward's work is kept for backward, as for `megatron_ext.linear_cross_entropy`.
        gradient_accumulation_fusion: the weight's gradient is added into its `main_grad`, by Megatron's protocol.
        skip_ignored, bits, logit_dtype: as for `megatron_ext.linear_cross_entropy`. With `skip_ignored` targets of -100
            and -1 are left out of products; an int bounds the number of other targets in a rank's part.

    Returns:
        `[B, S - 1]`, for a pack `[N, unpacked_seqlen - 1]`, fp32 (fp64 for fp64), of whole sequences on every rank;
        with `return_entropy` a tuple of these and the entropies. Gradients go to hidden states and weight, and under
        context parallelism those of all ranks' losses add up.

    Communicates: over `tp_group` 1 collective, backward 1; with the sequence layout 2 and 2. Over `cp_group`, for each
    result, 1 all-gather and backward 1 reduce-scatter. Sampling: see `megatron_ext.head.linear_sampled_log_probs`.

    Raises:
        ValueError: as in `from_parallel_logits_to_logprobs`, or `..._packed_sequences`; or both weights are None.
    """
    weight = output_weight_layer if output_weight is None else output_weight
    if weight is None:
        raise ValueError("output_weight_layer and output_weight are None: one must be the weight [V/R, D]; pass it")
    shape = _positions(tensor_parallel_hidden_states, hidden_layout, tp_group)
    targets: Targets
    if cu_seqlens_padded is None:
        targets = PaddedTargets(target, shape, cp_group, group_size(tp_group) if hidden_layout == "sequence" else 1)
    else:
        rows = number(unpacked_seqlen)
        targets = PackedTargets(target, shape, cp_group, cu_seqlens_padded, rows, cu_seqlens=cu_seqlens)
    check_call(chunk_size, sampling_params)
    sampling = sampling_of(sampling_params)
    check_option("temperature", sampling.temperature)
    if return_entropy and filters(sampling.top_k, sampling.top_p):
        raise ValueError(
            "return_entropy is True together with top_k or top_p: the entropy is that of the whole vocabulary; "
            "call once for each, or turn the filter off"
        )

    def compute(labels: Tensor) -> Any:
        return _log_probs(
            tensor_parallel_hidden_states,
            weight,
            labels,
            tp_group,
            chunk_size,
            sampling_params,
            return_entropy,
            vocab=_shard(vocab_start_index, vocab_end_index, weight, tp_group),
            hidden_layout=hidden_layout,
            cache=cache,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            skip_ignored=skip_ignored,
            bits=bits,
            logit_dtype=logit_dtype,
        )

    with saving(not inference_only):
        return whole_results(targets, compute, tensor_parallel_hidden_states)


class ChunkedDistributedHiddenStatesToLogprobs(PlainFunction):
    """`[B, S]`: log-probability of each target (already shifted, `[B, S]`) from hidden states `[S/R, B, D]`.

    `output_weight_layer`: the weight `[V/R, D]`. With `hidden_layout="replicated"` hidden states are `[S, B, D]`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor_parallel_hidden_states: Tensor,
        target: Tensor,
        output_weight_layer: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: Group,
        inference_only: bool = False,
        hidden_layout: HiddenLayout = "sequence",
    ) -> Tensor:
        with saving(not inference_only):
            check_dims("target is", target, 2, "it must be token ids [batch, sequence], shifted already")
            vocab = _shard(vocab_start_index, vocab_end_index, output_weight_layer, tp_group)
            return _log_probs(
                tensor_parallel_hidden_states,
                output_weight_layer,
                target,
                tp_group,
                chunk_size,
                vocab=vocab,
                hidden_layout=hidden_layout,
            )


def _log_probs(
    hidden_SBD: Tensor,
    weight: Tensor,
    labels_BS: Tensor,
    tp_group: Group,
    chunk_size: int | None,
    sampling_params: Any = None,
    return_entropy: bool = False,
    **call: Any,
) -> Any:
    """Return log-probabilities `[B, S]`, with `return_entropy` a tuple of these and the entropies."""
    sampling, labels_BS = sampling_of(sampling_params), padding_ignored(labels_BS)
    call |= {
        "tp_group": whole_if_none(tp_group),
        "temperature": sampling.temperature,
        "chunk_tokens": chunk_tokens(chunk_size, labels_BS.shape[0]),
    }
    if not filters(sampling.top_k, sampling.top_p):
        found = head.linear_log_probs(hidden_SBD, weight, labels_BS.t(), return_entropy=return_entropy, **call)
        return found.t() if isinstance(found, Tensor) else tuple(x.t() for x in found)
    call.pop("cache")
    call |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
    return head.linear_sampled_log_probs(hidden_SBD, weight, labels_BS.t(), **call).t()


def _shard(start: int, stop: int, weight: Any, tp_group: Group) -> VocabShard | None:
    """Return the shard of a weight; None for anything else, which the head refuses."""
    is_weight = isinstance(weight, Tensor) and weight.dim() == 2
    return shard(start, stop, weight.shape[0], tp_group) if is_weight else None


def _positions(hidden_SBD: Tensor, layout: HiddenLayout, tp_group: Group) -> torch.Size:
    """Return the shape `[B, S/W]` of the tokens that hidden states stand for, on all tensor-parallel ranks."""
    check_dims("hidden states are", hidden_SBD, 3, "they must be [sequence, batch, hidden size], as in Megatron")
    one_of("hidden_layout", layout, get_args(HiddenLayout))
    slices = group_size(check_group(tp_group)) if layout == "sequence" else 1
    return torch.Size((hidden_SBD.shape[1], hidden_SBD.shape[0] * slices))
