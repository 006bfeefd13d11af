"""NeMo-RL's autograd functions on vocabulary-parallel logits, as names for calls of head/.

The functions of head/ are differentiable and save next to nothing, so `apply` only runs `forward`, which has NeMo-RL's
parameters, and autograd records what head/ does. With `inference_only` nothing is recorded, and the result needs no
gradient. Results are fp32 (fp64 for fp64), gradients have the logits' dtype.

    DistributedLogprob.apply(logits, target, start, end, group)

All of them send 1 all-gather over the group forward and nothing backward, whatever `chunk_size`, with one exception:
top-p without top-k sends 2, and with a `chunk_size` up to 2 a chunk, of at least two chunks. A group of None means
logits that are whole. -100 and -1 as a target give 0 and no gradient. A fault that the head finds is a ValueError on
every rank.

Legend: B sequences, S positions, V vocabulary, R ranks of the group.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext import head
from megatron_ext.distributed.groups import Group
from megatron_ext.model_utils.arguments import (
    TrainingSamplingParams,
    chunk_tokens,
    log_probs,
    saving,
    shard,
    whole_if_none,
    without_padding,
)


def _compute_distributed_log_softmax(vocab_parallel_logits: Tensor, group: Group) -> Tensor:
    """`[..., V/R]`: log-probabilities over the whole vocabulary of logits `[..., V/R]`. Differentiable."""
    return head.vocab_parallel_log_softmax(vocab_parallel_logits, tp_group=whole_if_none(group))


_compute_distributed_log_softmax_with_grad = _compute_distributed_log_softmax
"""`_compute_distributed_log_softmax`, which is differentiable as it is."""


def _compute_distributed_softmax(vocab_parallel_logits: Tensor, group: Group) -> Tensor:
    """`[..., V/R]`: probabilities over the whole vocabulary of logits `[..., V/R]`. Differentiable."""
    return head.vocab_parallel_softmax(vocab_parallel_logits, tp_group=whole_if_none(group))


class PlainFunction(torch.autograd.Function):
    """An autograd function by name, whose `forward` is differentiable code: `apply` only calls it."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(None, *args, **kwargs)


class DistributedLogprob(PlainFunction):
    """`[B, S]`: log-probability of each target (already shifted) from logits `[B, S, V/R]`."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        return ChunkedDistributedLogprob.apply(
            vocab_parallel_logits, target, vocab_start_index, vocab_end_index, None, group, inference_only
        )


class ChunkedDistributedLogprob(PlainFunction):
    """`DistributedLogprob`, `chunk_size` positions at a time. None, as everywhere: the head chooses."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        with saving(not inference_only):
            columns = (vocab_start_index, vocab_end_index)
            return log_probs(vocab_parallel_logits, target, columns, tp_group, chunk_size)


class DistributedLogprobWithSampling(PlainFunction):
    """`[B, S]`: log-probability of each target in the distribution of logits `[B, S, V/R]` after top-k, then top-p.

    -inf for a target that is filtered out; filtered logits get no gradient.
    See `megatron_ext.head.sampled_log_probs`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: Group,
        top_k: int | None,
        top_p: float,
        inference_only: bool = False,
    ) -> Tensor:
        return ChunkedDistributedLogprobWithSampling.apply(
            vocab_parallel_logits, target, tp_group, top_k, top_p, None, inference_only
        )


class ChunkedDistributedLogprobWithSampling(PlainFunction):
    """`DistributedLogprobWithSampling`, `chunk_size` positions at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: Group,
        top_k: int | None,
        top_p: float,
        chunk_size: int | None,
        inference_only: bool = False,
    ) -> Tensor:
        with saving(not inference_only):
            sampling = TrainingSamplingParams(top_k, top_p)
            return log_probs(vocab_parallel_logits, target, None, tp_group, chunk_size, sampling)


class DistributedCrossEntropy(PlainFunction):
    """`[B, S]`: -sum p log q, p the softmax of the target logits and q of the student's, both `[B, S, V/R]`.

    Only the student gets a gradient: that of the forward KL.
    """

    @staticmethod
    def forward(
        ctx: Any, student_logits: Tensor, target_logits: Tensor, group: Group, inference_only: bool = False
    ) -> Tensor:
        with saving(not inference_only):
            return head.soft_cross_entropy(student_logits, target_logits, tp_group=whole_if_none(group))


class ChunkedDistributedGatherLogprob(PlainFunction):
    """`[B, S, K]`: log-probabilities of the tokens `global_indices` `[B, S, K]` from logits `[B, S, V/R]`.

    dL/dz = -softmax * sum_k(dL/dy_k) + scatter_add(dL/dy_k). An id of -1 gives 0 and no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Tensor,
        global_indices: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        with saving(not inference_only):
            indices, there = without_padding(global_indices)
            found = head.gather_log_probs(
                vocab_parallel_logits,
                indices,
                tp_group=whole_if_none(tp_group),
                vocab=shard(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1], tp_group),
                chunk_tokens=chunk_tokens(chunk_size, vocab_parallel_logits.shape[:-2].numel()),
            )
            assert isinstance(found, Tensor)
            return found.where(there, 0.0)


class ChunkedDistributedEntropy(PlainFunction):
    """`[B, S]`: sum p log p, the negative of the entropy, of logits `[B, S, V/R]`."""

    @staticmethod
    def forward(
        ctx: Any, vocab_parallel_logits: Tensor, chunk_size: int | None, tp_group: Group, inference_only: bool = False
    ) -> Tensor:
        with saving(not inference_only):
            chunk = chunk_tokens(chunk_size, vocab_parallel_logits.shape[:-2].numel())
            return -head.token_entropy(vocab_parallel_logits, whole_if_none(tp_group), chunk_tokens=chunk)
