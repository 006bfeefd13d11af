"""A weighted sum of a read-out of labels, whose gradient forward makes chunk by chunk: 6 T V D / R FLOPs, in the memory
of one chunk.

Forward knows the gradient of `s = sum_t w_t loss_t` but for one factor, the upstream gradient of s. So forward makes
each chunk's logits, and from them dx and a term of dW; backward multiplies dx and dW by the factor. No logits are made
again or kept. Both gradients are in fp32 until then (fp64 for fp64), and are rounded once, in backward.

Legend: T tokens (after any gather), t of a chunk, D hidden size, V columns of this rank's vocabulary shard.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.autograd import differentiable_once, without_autocast
from megatron_ext.distributed import collectives
from megatron_ext.head.call import statistics
from megatron_ext.head.call.chunk_sizes import chunks, keeps_all, summed_chunks
from megatron_ext.head.call.logit_gradient import basis_of
from megatron_ext.head.call.resolved_head import Leaf
from megatron_ext.head.engine.linear import WeightGradient, finished_dx, leaf_weights, weight_gradients
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.readouts.read_out import CrossEntropy, LogProbs
from megatron_ext.head.row_passes.passes import RowPasses
from megatron_ext.numerics import tensors
from megatron_ext.numerics.tensors import accumulation_dtype, part_of, pieces
from megatron_ext.numerics.tree_sums import start_sum_of_ranks


def chunks_in_forward(plan: Plan, x_TD: Tensor) -> list[slice] | None:
    """Return the chunks of tokens in which forward makes the gradient of a sum; None: `LinearHead.backward` makes it.

    The chunks follow from numbers that every rank knows, so all ranks exchange the same chunks. `x_TD`: hidden states
    in the dtype to compute in.

    Forward makes the gradient only with the default `cache`, and if that would not keep all exponentials: an fp32 dW
    takes less memory than these. It does not with fixed bits, with a fused epilogue, or in fp16: to stay in fp16's
    range a gradient needs the loss scale, which only backward knows.
    """
    call = plan.call
    keeps = call.cache != "bounded" or keeps_all(call, plan.tokens, x_TD)
    known = type(plan.readouts[0]) in (CrossEntropy, LogProbs) and not plan.needs_logits
    other = plan.fixed or call.fused_epilogue or x_TD.dtype == torch.float16
    if keeps or other or not known or not plan.tokens:
        return None
    return summed_chunks(plan.tokens, call.chunk_tokens, x_TD, _bends(plan))


class SummedHead(torch.autograd.Function):
    """The sum over all tokens of `weights` times the result of `plan`'s read-out, a scalar: of hidden states `[T, D]`,
    weight, bias and low rank as `LinearHead` takes them.

    `chunks`: see `chunks_in_forward`. `sizes`: with the sequence layout, where hidden states are this rank's slice, the
    number of each rank's tokens; else None. `weights_T`: `[T]`, without a gradient.

    dx and dW are saved for backward in fp32; hidden states and exponentials are not. Only backward writes a main_grad.

    Communicates, at several ranks: forward an all-gather of statistics for each chunk, the first of which checks
    faults, options and labels; backward one all-reduce of dx. With the sequence layout forward also gathers the hidden
    states, and dx is reduce-scattered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        chunks: list[slice],
        sizes: list[int] | None,
        weights_T: Tensor,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        low_VR: Tensor | None,
    ) -> Tensor:
        call, (need_dx, need_dw, need_db, need_dlow) = plan.call, ctx.needs_input_grad[4:]
        with without_autocast(hidden_TD):
            x_TD = hidden_TD if sizes is None else collectives.all_gather(hidden_TD, call.group, sizes=sizes)
            w_VD, (whole,) = leaf_weights(weight_VD, low_VR, bias_V, plan, x_TD)
            wide, columns = accumulation_dtype(x_TD.dtype), slice(0, w_VD.shape[0])
            parts = [(need_dw, weight_VD), *([] if low_VR is None else [(need_dlow, low_VR)])]
            sums = [x_TD.new_empty(like.shape, dtype=wide) if need else None for need, like in parts]
            db_V = x_TD.new_zeros(w_VD.shape[0], dtype=wide) if need_db else None
            dx_TD = x_TD.new_empty(x_TD.shape, dtype=wide) if need_dx else None
            values = []
            for rows in chunks:
                leaf, x_tD = whole._replace(target_T=part_of(whole.target_T, rows)), part_of(x_TD, rows)
                value_t, grad, g_tV = _chunk(plan, leaf, rows, x_tD, weights_T[rows])
                values.append(value_t)
                if dx_TD is not None:
                    product_tD = plan.arithmetic.add_product(None, g_tV, leaf.w_VD)
                    finished_dx(slice(0, len(x_tD)), product_tD, grad, leaf, plan, False, part_of(dx_TD, rows))
                    del product_tD
                for side in weight_gradients(w_VD, sums, x_tD, leaf, grad, plan, [rows.start > 0] * 2):
                    side.add(columns, g_tV)
                    side.finish()
                if db_V is not None:
                    db_V += plan.arithmetic.column_sums(g_tV, grad.scale)
                    ones_t1 = db_V.new_ones(len(x_tD), 1)
                    WeightGradient(db_V.unsqueeze(1), ones_t1, leaf, grad, plan, accumulate=True).add_exact()
                del g_tV  # before the next chunk's logits are made
        total = (torch.cat(values) * weights_T).sum()
        ctx.save_for_backward(total, dx_TD, db_V, *sums)  # the result too: through it a second derivative comes here
        ctx.group, ctx.sizes, ctx.passes = call.group, sizes, plan.passes
        ctx.parameter = weight_VD if call.fuse_main_grad and need_dw else None
        ctx.dtypes = [x_TD.dtype, *(None if x is None else x.dtype for x in (weight_VD, bias_V, low_VR))]
        return total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, dx_TD, db_V, dw_VD, *low = ctx.saved_tensors
        passes, (of_hidden, dtype, of_bias, of_low), sum_TD = ctx.passes, ctx.dtypes, None
        if dx_TD is not None:
            dx_TD = _scaled(dx_TD, grad, of_hidden, passes)
            sum_TD = start_sum_of_ranks(dx_TD, dx_TD, ctx.group, ctx.sizes, fixed=False)
        db_V = None if db_V is None else (db_V * grad).to(of_bias)
        dlow_VR = _scaled(low[0], grad, of_low, passes) if low and low[0] is not None else None
        if ctx.parameter is not None:
            fused_VD = main_grad.buffer_of(ctx.parameter)
            for rows in pieces(dw_VD):
                fused_VD[rows] += dw_VD[rows] * grad
            dw_VD = main_grad.finish(ctx.parameter, dtype)
        elif dw_VD is not None:
            dw_VD = _scaled(dw_VD, grad, dtype, passes)
        return None, None, None, None, None if sum_TD is None else sum_TD.wait(), dw_VD, db_V, dlow_VR


def _bends(plan: Plan) -> bool:
    """Return whether the gradient needs more than exponentials, so that a chunk's logits must stay in memory."""
    return plan.call.softcap is not None or plan.call.expected


def _chunk(plan: Plan, leaf: Leaf, rows: slice, x_tD: Tensor, weights_t: Tensor) -> tuple[Tensor, Any, Tensor]:
    """Return the result of each token of a chunk, and the gradient of their weighted sum: its coefficients, and the
    gradient matrix. `leaf`: with the labels of the chunk. Communicates: at several ranks 1 all-gather."""
    call, tokens = plan.call, len(x_tD)
    stats_Kt = statistics.new_statistics(
        tokens, plan.shared_rows, plan.ranks, accumulation_dtype(x_tD.dtype), x_tD.device
    )
    shift_t, columns, bent = stats_Kt.new_empty(tokens), leaf.w_VD.shape[0], _bends(plan)
    in_place = not (x_tD.is_cuda and tensors.widens(x_tD, call.rounds))
    g_tV, every = tensors.new_matrix(x_tD, tokens, columns), slice(0, tokens)
    # fp32 logits of a quarter of the tokens take half of the memory of all exponentials.
    parts = [every] if bent or in_place else chunks(every, -(-tokens // 4), columns, on_gpu=True)
    for part in parts:
        out_tV = part_of(g_tV, part)
        z_tV = plan.arithmetic.logits(part_of(x_tD, part), leaf.w_VD, out_tV if in_place else None, call.rounds)
        plan.passes.row_statistics(
            z_tV,
            part_of(leaf.target_T, part),
            stats_Kt[:, part],
            exp_TV=None if bent else out_tV,
            shift_T=part_of(shift_t, part),
            bias_V=leaf.bias_V,
            labelled=plan.labelled,
            counted=leaf.vocab.counted,
            **plan.sums,
        )
        if not bent:
            del z_tV  # before the next ones are made
    stats_RKt = plan.exchange_chunk(stats_Kt, rows.start == 0)
    stats = plan.passes.combined(stats_RKt, stats_Kt, shift_t, call)
    readout = plan.readouts[0].copied()
    readout.labels_T = part_of(readout.labels_T, rows)
    readout.counts_T = None if readout.counts_T is None else readout.counts_T[rows]
    (value_t, *_), saved = readout.results(stats, stats_RKt, stats_Kt)
    kept_t = None if plan.kept_T is None else plan.kept_T[rows]
    basis = basis_of([readout], stats, [saved], [weights_t])
    grad = plan.passes.token_gradient(stats, kept_t, leaf.target_T, basis, call, plan.labelled)
    if grad.inside is not None:
        plan.passes.row_gradient(
            z_tV,
            leaf.target_T,
            grad.shift,
            g_tV,
            *grad.inside,
            bias_V=leaf.bias_V,
            counted=leaf.vocab.counted,
            softcap=call.softcap,
            temperature=call.temperature,
        )
    return value_t, grad, g_tV


def _scaled(x_ND: Tensor, factor: Tensor, dtype: torch.dtype, passes: RowPasses) -> Tensor:
    """Return `factor * x`, rounded once to `dtype`, without a second tensor in the dtype of `x`."""
    out_ND, factor_N = x_ND.new_empty(x_ND.shape, dtype=dtype), factor.to(accumulation_dtype(x_ND.dtype))
    passes.scale_rows(out_ND, x_ND, factor_N.expand(x_ND.shape[0]))
    return out_ND
