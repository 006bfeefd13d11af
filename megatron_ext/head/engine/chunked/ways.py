"""Read-outs of logits chunk by chunk, forward and backward: of logits that exist, and of those that a product makes.

`OfLogits` serves every read-out; `OfChunks` those of hidden states whose gradient wants logits or that have statistics
of their own. The others have `linear.py`, which makes no logits again for what it keeps.

Legend: T tokens, t of a chunk, D hidden size, V columns of this rank's vocabulary shard, K columns, R ranks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.engine import chunk_sizes, statistics
from megatron_ext.head.engine.autograd import Asked, HeadGradients, Passed, Way
from megatron_ext.head.engine.chunked import kept_gradient, sources
from megatron_ext.head.engine.chunked.gradient import ChunkGradient, logits_of_chunk, sides_of
from megatron_ext.head.engine.chunked.sources import Product, Rule
from megatron_ext.head.engine.flatten import in_runs, new_gradient, rows_of
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.fixed_bits.source import chunks as fixed_chunks
from megatron_ext.head.readouts.read_out import Chunk
from megatron_ext.head.row_passes.dispatch import combined, row_statistics
from megatron_ext.head.row_passes.logit_passes import MAX, SUM_EXP, accumulation_dtype, part_of
from megatron_ext.head.row_passes.side_by_side import WeightSums


class OfLogits(Way):
    """Logits `[T, V]`, or as `Flat.rows` has them, and those of read-outs that have a teacher, which get no gradient.

    `rules`: of each. Saves the logits themselves. `into_logits`: backward writes the gradient into their memory, once.
    The ranks' logits may lie in memory in different orders, above all those of an empty shard: `plan.places_T` says in
    which.

    Communicates: forward what the read-outs' exchange does, backward nothing.
    """

    def __init__(self, rules: Sequence[Rule], into_logits: bool):
        self.rules, self.into_logits = rules, into_logits

    def forward(self, plan: Plan, *logits: Any) -> Passed:
        chunks = plan.chunks() or _chunks(logits, plan)
        return _read(plan, sources.of_logits(logits, self.rules), chunks, logits[0])

    def backward(self, asked: Asked) -> tuple[Tensor | None, ...]:
        logits = asked.inputs
        gradient = ChunkGradient(asked, sources.of_logits(logits, self.rules))
        dz = logits[0].detach() if self.into_logits else new_gradient(logits[0])
        for rows in _chunks(logits, asked.plan, copy=not self.into_logits):
            gradient.write(rows, rows_of(dz, rows))
        return (dz.view(logits[0].shape),)


class OfChunks(Way):
    """Hidden states `[T, D]`, weight `[V, D]`, bias `[V]` and a low rank beside the weight, whose columns of the hidden
    states are the last ones; and the same of each read-out's teacher, without a gradient.

    `rules`: softcap and scale of these logits, and whether they are rounded, and of each teacher's. Never holds more
    than a chunk of logits of each: backward makes them again, 8 T V D FLOPs in all (6 where the gradient needs none),
    beside those of teachers; of what `kept_gradient.py` keeps none. Weight gradients add up in fp32. `sizes`: with the
    sequence layout, where hidden states are this rank's slice, the number of each rank's tokens; else None. `keep`: a
    backward may follow.

    Communicates, at several ranks: forward what the exchange does, backward `HeadGradients.send`. With the sequence
    layout each also gathers the hidden states, with the teachers' in the same collective.
    """

    def __init__(self, rules: Sequence[tuple[float | None, float, bool]], sizes: list[int] | None, keep: bool):
        self.rules, self.sizes, self.keep = rules, sizes, keep

    def forward(self, plan: Plan, *inputs: Any) -> Passed:
        made = sources.of_hidden(inputs, self.rules, plan.call, self.sizes)
        kept = kept_gradient.of(plan, made[0]) if self.keep else None
        found = _read(plan, made, _product_chunks(plan, made[0], kept), inputs[0], kept)
        return found if kept is None else found._replace(kept=(kept.unit_TV, kept.bad_T))

    def backward(self, asked: Asked) -> tuple[Tensor | None, ...]:
        plan, chosen, (x_TD, weight_VD, bias_V, low_VR, *_) = asked.plan, asked.plan.call.chosen, asked.inputs
        made = sources.of_hidden(asked.inputs, self.rules, plan.call, self.sizes)
        source, out = made[0], HeadGradients(asked, self.sizes)
        if len(plan.readouts) == 1 and plan.readouts[0].by_factor and asked.grads[0] is not None:
            # Hidden states of tokens that do not count may be NaN: as where the gradient is kept, they add nothing.
            source.x_TD = source.x_TD.masked_fill((asked.grads[0] == 0).unsqueeze(1), 0)
        gradient, wide = ChunkGradient(asked, made), accumulation_dtype(x_TD.dtype)
        x_TD, columns = source.x_TD, source.w_VD.shape[0]
        fixed = source.rule.fixed
        dx_TD = x_TD.new_empty(x_TD.shape, dtype=wide if fixed else x_TD.dtype) if out.dx else None
        sums = WeightSums(source.w_VD, (out.dw, out.dlow), wide, out.fused if chosen is None else None)
        total_V = x_TD.new_zeros(columns, dtype=wide) if out.db else None
        kept = kept_gradient.Kept(plan, source, *asked.kept) if asked.kept else None
        if kept is not None:
            kept.add_products(asked.grads[0], (dx_TD, sums, total_V))
        for rows in _product_chunks(plan, source, kept):
            if kept is not None and rows.stop <= kept.tokens:
                continue
            dz_tV = source.room(rows)
            gradient.write(rows, dz_tV)
            if dx_TD is not None:
                dx_TD[rows] = source.times_weight(dz_tV)
            if sums.wanted:
                source.add_times_hidden(sums, dz_tV, rows)
            if total_V is not None:
                source.add_sums(total_V, dz_tV)
            del dz_tV  # before the next one is made
        if dx_TD is not None:
            out.send(dx_TD)
        out.dw_VD, out.dlow_VR, out.db_V = sums.totals[0], sums.totals[-1] if out.dlow else None, total_V
        if chosen is not None:
            out.dw_VD = _of_all(out.dw_VD, chosen, weight_VD, out.fused)
            out.dlow_VR, out.db_V = _of_all(out.dlow_VR, chosen, low_VR), _of_all(total_V, chosen, bias_V)
        return out.given()


def _of_all(part: Tensor | None, chosen: Tensor, like: Any, total: Tensor | None = None) -> Tensor | None:
    """The gradient of all columns, of that of the chosen ones: added to `total`, or new."""
    if part is None:
        return None
    if total is not None:
        return total.index_add_(0, chosen, part.to(total.dtype))
    return torch.zeros_like(like).index_copy_(0, chosen, part.to(like.dtype))


def _product_chunks(plan: Plan, source: Product, kept: kept_gradient.Kept | None) -> list[slice]:
    if kept is not None:
        return kept.chunks()
    return plan.chunks() or _row_chunks(plan, source.w_VD.shape[0])


def _row_chunks(plan: Plan, columns: int) -> list[slice]:
    if plan.call.bits != "fast":
        return fixed_chunks(plan.call, plan.tokens, 0, columns)
    return chunk_sizes.chunks(slice(0, plan.tokens), plan.call.chunk_tokens, columns)


def _chunks(logits: Sequence[Tensor], plan: Plan, copy: bool = True) -> list[slice]:
    """All tokens, by chunks whose rows are the logits' own memory, or copied if they are few; never without `copy`."""
    chunks: Iterable[slice] = plan.chunks() or _row_chunks(plan, logits[0].shape[-1])
    for z in logits:
        chunks = in_runs(z, chunks, copy=copy)
    return [*chunks]


def _read(
    plan: Plan, made: Sequence[Any], chunks: list[slice], like: Tensor, kept: kept_gradient.Kept | None = None
) -> Passed:
    """The shared statistics, the results, and what gradients want of forward."""
    call, dtype = plan.call, accumulation_dtype(like.dtype)
    plan.begin(chunks if plan.tokens else [], like.device)
    stats_KT = statistics.new_statistics(plan.tokens, call, dtype, like.device, plan.rows)
    own_KT = stats_KT.new_empty(plan.own_rows, plan.tokens) if plan.own_rows else None
    shift_T = stats_KT.new_empty(plan.tokens)
    for rows in chunks:
        raw_tV, logits = logits_of_chunk(plan, made, rows, keep_raw=kept is not None)
        stats_Kt = stats_KT[:, rows]
        if plan.softmax:
            shift_t = part_of(shift_T, rows)
            row_statistics(
                logits[0], part_of(plan.target_T, rows), stats_Kt, None, shift_t, None, *call.sums(call.counted)
            )
        else:
            stats_Kt[MAX : SUM_EXP + 1] = statistics.fingerprint(logits[0], call.counted)
        for at, readout, part_Kt, own_Kt in plan.parts(stats_Kt, own_KT, rows):
            readout.scan(Chunk(rows, sides_of(plan, logits, at), part_Kt, own_Kt))
            if kept is not None:
                kept.write(rows, readout, raw_tV, logits, part_Kt)
        del raw_tV, logits  # before the next ones are made
    stats_RKT = plan.exchange(stats_KT)
    stats = combined(stats_RKT, stats_KT, shift_T, call) if plan.softmax else None
    return Passed(stats, *plan.results(stats, stats_RKT, stats_KT, own_KT))
