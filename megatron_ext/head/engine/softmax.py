"""The softmax or log-softmax over the whole vocabulary, as a tensor of the logits' size.

Legend: T tokens, V columns of this rank's vocabulary shard.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.autograd import differentiable_once
from megatron_ext.distributed import collectives
from megatron_ext.head import checks
from megatron_ext.head.call import statistics
from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.head.call.matmul import transformed
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.engine.stored_logits import Flat
from megatron_ext.head.row_passes.passes import passes_of
from megatron_ext.numerics.tensors import accumulation_dtype


def dense_softmax(z: Any, logarithm: bool) -> Tensor:
    """Probabilities of `z`'s logits `[..., V/R]`, or their logarithms, in fp32 (fp64 for fp64), in their shape."""
    flat, call = Flat(z.logits), z.resolved()
    z_TV = flat(z.logits)
    fault = checks.shard_fault(call.vocab, z.logits.shape[-1], "logits", call.ranks)
    if fault is not None:
        if call.ranks > 1:
            statistics.refuse(z_TV.shape[0], call, accumulation_dtype(z_TV.dtype), z_TV.device)
        raise fault
    return flat.up(DenseSoftmax.apply(z_TV, logarithm, call, flat.places(z_TV.device, call.ranks)))


class DenseSoftmax(torch.autograd.Function):
    """`[T, V]` of logits `[T, V]`: probabilities, or their logarithms; those are saved too. `places_T`: of the tokens,
    see `Flat.places`.

    Communicates: forward 1 all-gather of statistics, backward 1 all-reduce of a number per token.
    """

    @staticmethod
    def forward(ctx: Any, z_TV: Tensor, logarithm: bool, call: ResolvedHead, places_T: Tensor | None = None) -> Tensor:
        counted, temperature = call.vocab.counted, call.temperature
        nowhere_T = torch.full((z_TV.shape[0],), -1, device=z_TV.device)
        rows, dtype = statistics.shared_rows(call), accumulation_dtype(z_TV.dtype)
        stats_KT = statistics.new_statistics(z_TV.shape[0], rows, call.ranks, dtype, z_TV.device)
        shift_T = stats_KT.new_empty(z_TV.shape[0])
        given = z_TV, nowhere_T, stats_KT[:, :-1]
        passes_of(z_TV).row_statistics(
            *given, shift_T=shift_T, counted=counted, softcap=call.softcap, temperature=temperature
        )
        stats_RKT = statistics.exchange(stats_KT, call, lambda: f"logarithm {logarithm}", [], nowhere_T, places_T)
        stats = statistics.combine(stats_RKT, stats_KT, shift_T, call)
        log_sum_T = stats.log_sum.to(dtype)
        largest_T = stats.largest.where(stats.largest > -torch.inf, 0.0).to(dtype)
        out_TV = torch.full_like(z_TV, -torch.inf if logarithm else 0, dtype=dtype)
        for at in blocks(z_TV):
            out = out_TV[at, :counted]
            out.copy_(transformed(z_TV[at, :counted], None, None, temperature, out.dtype))
            out.sub_(largest_T[at].unsqueeze(1)).sub_(log_sum_T[at].unsqueeze(1))
            if not logarithm:
                out.exp_()
        ctx.call, ctx.logarithm, ctx.dtype = call, logarithm, z_TV.dtype
        ctx.save_for_backward(out_TV, places_T)
        return out_TV

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_TV: Tensor):
        out_TV, places_T = ctx.saved_tensors
        dz_TV = torch.empty_like(out_TV, dtype=ctx.dtype)
        sums_T = out_TV.new_empty(out_TV.shape[0])
        for at in blocks(out_TV):
            counts = out_TV[at] > -torch.inf
            weighed = grad_TV[at].where(counts, 0.0) if ctx.logarithm else grad_TV[at] * out_TV[at]
            sums_T[at] = weighed.sum(1)
        if places_T is not None:
            sums_T = torch.empty_like(sums_T).index_copy_(0, places_T, sums_T)
        sums_T = collectives.all_reduce(sums_T, ctx.call.group if out_TV.shape[0] else None, in_place=True)
        if places_T is not None:
            sums_T = sums_T[places_T]
        for at in blocks(out_TV):
            out, g, sums = out_TV[at], grad_TV[at], sums_T[at].unsqueeze(1)
            dz = g.where(out > -torch.inf, 0.0) - out.exp() * sums if ctx.logarithm else out * (g - sums)
            dz_TV[at] = dz / ctx.call.temperature
        return dz_TV, None, None, None
