"""The head on logits that the caller already has: the same statistics and gradient; no tensor of their size is saved.

Legend: T tokens, V columns of this rank's vocabulary shard.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.engine import logit_gradient, statistics
from megatron_ext.head.engine.chunk_sizes import chunks
from megatron_ext.head.engine.flatten import in_runs, new_gradient, rows_of, tokens_of
from megatron_ext.head.engine.once_differentiable import differentiable_once
from megatron_ext.head.engine.options import HeadOptions
from megatron_ext.head.row_passes.dispatch import row_gradient, row_statistics, token_results
from megatron_ext.head.row_passes.logit_passes import accumulation_dtype
from megatron_ext.head.validation.argument_checks import check_exchange


class LogitsHead(torch.autograd.Function):
    """`(loss_T, entropy_T or None, hits_T or None, z_loss_T or None)` of logits `[T, V]`, or as `Flat.rows` has them.

    Saves the logits themselves. `into_logits`: backward writes the gradient into their memory, once. `places_T`: as
    `Flat.places`; the ranks' logits may lie in memory in different orders, above all those of an empty shard.

    Communicates: forward one all-gather of statistics at several ranks, backward nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, labels_T: Tensor, options: HeadOptions, into_logits: bool, places_T: Tensor | None
    ):
        ctx.set_materialize_grads(False)
        kept_T = labels_T != options.ignore_index
        target_T = (labels_T.long() - options.vocab.start).where(options.vocab.owns(labels_T) & kept_T, -1)
        stats_KT = statistics.new_statistics(tokens_of(z), options, accumulation_dtype(z.dtype), z.device)
        shift_T = stats_KT.new_empty(kept_T.shape[0])
        for rows in _chunks(z, options):
            row_statistics(
                rows_of(z, rows),
                target_T[rows],
                stats_KT[:, rows],
                None,
                shift_T[rows],
                None,
                options.vocab.counted,
                options.softcap,
                options.temperature,
                options.label_smoothing > 0,
                options.entropy,
                options.hits,
            )
        stats_KT = statistics.sign(stats_KT, options, labels_T, places_T)
        stats_RKT = statistics.exchange(stats_KT, options, places_T)
        check_exchange(stats_RKT, labels_T, options)
        stats, results = token_results(stats_RKT, stats_KT, shift_T, kept_T, options)
        ctx.options, ctx.into_logits = options, into_logits
        ctx.save_for_backward(z, target_T, kept_T, *stats)
        ctx.mark_non_differentiable(*(mark for mark in (results.hits, results.z_loss) if mark is not None))
        return tuple(results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_loss_T: Tensor | None, grad_entropy_T: Tensor | None, *_: None):
        options = ctx.options
        z, target_T, kept_T, *rest = ctx.saved_tensors
        stats = statistics.Statistics(*rest)
        coef = logit_gradient.coefficients(stats, kept_T, grad_loss_T, grad_entropy_T, options)
        scale, slope, offset = logit_gradient.pass_coefficients(stats, coef)
        value = (coef.target if coef.d is None else coef.target + coef.d) * logit_gradient.target_bend(stats)
        value = value.to(stats.shift.dtype)
        dz = z.detach() if ctx.into_logits else new_gradient(z)
        for rows in _chunks(z, options, ctx.into_logits):
            row_gradient(
                rows_of(z, rows),
                False,
                target_T[rows],
                stats.shift[rows],
                scale[rows],
                None if slope is None else slope[rows],
                None if offset is None else offset[rows],
                value[rows],
                rows_of(dz, rows),
                None,
                options.vocab.counted,
                options.softcap,
                options.temperature,
            )
        return dz.view(z.shape), None, None, None, None


def _chunks(z: Tensor, options: HeadOptions, into_logits: bool = False) -> Iterator[slice]:
    """All tokens, by chunks; `into_logits`: the rows of each must be the logits' own memory."""
    found = chunks(slice(0, tokens_of(z)), options.chunk_tokens, z.shape[-1])
    return in_runs(z, found, copy=not into_logits)
