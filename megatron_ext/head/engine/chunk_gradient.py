"""The gradient of logits, chunk by chunk: that through the softmax, at chosen columns and places, and what read-outs
pull from a chunk of logits; and the one that is made and kept in forward, of a read-out whose upstream gradient is a
factor of each token.

Where nothing is exchanged, a chunk's own statistics say what its read-out's gradient is, while the logits of student
and teacher are there: it is written over the student's. Backward makes no logits then, and the factors g commute with
the products' other sides, as in `linear.py`:

    dx = g * (U @ W)        dW = U.T @ (g * x)

Legend: T tokens, t of a chunk, D hidden size, V columns of this rank's vocabulary shard, K columns or statistics. U:
the gradient where g is 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.call import chunk_sizes, logit_gradient, matmul
from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.head.call.matmul import WeightSums, transformed
from megatron_ext.head.engine.logit_sources import ComputedLogits
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.readouts.read_out import AtColumns, AtPlaces
from megatron_ext.head.row_passes.fixed_order_sums import sums_of_equals
from megatron_ext.numerics import cpu_products, tensors
from megatron_ext.numerics.tensors import accumulation_dtype, has_values, part_of, parts_of


def logits_of_chunk(made: Sequence[Any], rows: slice, keep_raw: bool) -> tuple[Tensor | None, list[Tensor]]:
    """The logits of each source as its transform leaves them; and with `keep_raw` the first ones before that."""
    raw_tV = made[0](rows)
    found = [made[0].transform.applied(raw_tV)]
    raw_tV = raw_tV if keep_raw else None  # before the teachers' are made
    for teacher in made[1:]:
        found.append(teacher.transform.applied(teacher(rows)))
    return raw_tV, found


class ChunkGradient:
    """The gradient of logits, chunk by chunk: all read-outs' added in it.

    `made`: where logits come from. `stats`: the softmax's, or None. `saved`: what each read-out wants of forward.
    `grads`: of its first result, or None. The gradient through the softmax is `_passed`, the coefficients of
    `row_gradient` rounded from the `_exact` ones in fp64, and `_value` at the label; None: nothing goes through it.
    """

    _value: Tensor
    _exact: logit_gradient.PassCoefficients

    def __init__(
        self,
        plan: Plan,
        made: Sequence[Any],
        stats: Any,
        saved: list[list[Tensor]],
        grads: Sequence[Tensor | None],
    ):
        self.plan, self.made, self.stats = plan, made, stats
        self.given = [
            (at, readout, each, grad)
            for at, (readout, each, grad) in enumerate(zip(plan.readouts, saved, grads, strict=True))
            if grad is not None
        ]
        self._passed: logit_gradient.PassCoefficients | None = None
        if stats is not None:
            basis = plan.basis(stats, saved, grads)
            if any(grad_T is not None for grad_T in basis):
                coef = logit_gradient.coefficients(stats, plan.kept_T, basis, plan.call.temperature)
                self._exact, dtype = logit_gradient.pass_coefficients(stats, coef), stats.shift.dtype
                value = logit_gradient.bent_at_target(coef.target if coef.d is None else coef.target + coef.d, stats)
                self._passed, self._value = self._exact.to(dtype), value.to(dtype)

    def write(self, rows: slice, out_tV: Tensor) -> None:
        plan, call = self.plan, self.plan.call
        if call.counted == 0:
            out_tV.zero_()
            return
        pulling = [each for each in self.given if each[1].reads_logits(each[2], rows)]
        each_at = [readout.at_columns(saved, rows, grad) for _, readout, saved, grad in self.given]
        columns = [each for each in each_at if each is not None]
        places = [readout.at_places(saved, rows, grad) for _, readout, saved, grad in self.given]
        bent = self.made[0].transform.changes
        logits: Any = None
        raw_tV = None
        if self._passed is not None or pulling or bent:
            raw_tV, logits = logits_of_chunk(self.made, rows, keep_raw=bent)
        first = self._passed is None and not columns  # of those that pull: nothing is there yet
        if self._passed is not None:
            self._write_softmax(self._passed, logits[0], rows, out_tV)
        elif columns or not pulling:
            out_tV.zero_()
        if columns:
            self._add_at_columns(columns, None if logits is None else logits[0], rows, out_tV)
        for at, readout, saved, grad in pulling:
            readout.pull(saved, rows, plan.sides_of(at, logits), grad, out_tV, first)
            if first:
                out_tV[:, call.counted :] = 0
            first = False
        for each in places:
            if each is not None:
                self._add_at_places(each, out_tV)
        if raw_tV is not None:
            self.made[0].transform.pull(raw_tV, out_tV)

    def _write_softmax(
        self, passed: logit_gradient.PassCoefficients, z_tV: Tensor, rows: slice, out_tV: Tensor
    ) -> None:
        plan, call = self.plan, self.plan.call
        scale_t, slope_t, offset_t, value_t = parts_of(rows, *passed, self._value)
        plan.passes.row_gradient(
            z_tV,
            part_of(plan.target_T, rows),
            part_of(self.stats.shift, rows),
            out_tV,
            scale_T=scale_t,
            slope_T=slope_t,
            offset_T=offset_t,
            value_T=value_t,
            counted=call.counted,
            softcap=call.softcap,
            temperature=call.temperature,
            labelled=plan.labelled,
        )

    def _add_at_places(self, each: AtPlaces, out_tV: Tensor) -> None:
        """In fp64, rounded once beside what is there."""
        at = each.token_n, self.plan.call.place(each.column_n)
        value_n = out_tV[at].double() + each.grad_n / self.plan.call.temperature
        out_tV.index_put_(at, value_n.to(out_tV.dtype))

    def _add_at_columns(self, found: Sequence[AtColumns], z_tV: Any, rows: slice, out_tV: Tensor) -> None:
        """At the ids in fp64, rounded once: there the terms cancel where the model is sure of one."""
        call = self.plan.call
        ids_tK = torch.cat([each.ids_tK for each in found], 1) if len(found) > 1 else found[0].ids_tK
        grad_tK = torch.cat([each.grad_tK for each in found], 1) if len(found) > 1 else found[0].grad_tK
        for part in blocks(ids_tK, 0.25):
            ids_uK, out_uV = ids_tK[part], out_tV[part]
            own_uK = call.vocab.owns(ids_uK)
            # Column 0 is written too: nothing is added to it.
            at_uK = call.place(ids_uK - call.vocab.start).where(own_uK, 0)
            value_uK = sums_of_equals((grad_tK[part].double() / call.temperature).where(own_uK, 0.0), at_uK)
            if self._passed is not None and z_tV is not None:
                of_all = slice(rows.start + part.start, rows.start + part.stop)
                value_uK = value_uK + self._softmax_at(self._passed.offset, z_tV[part], at_uK, of_all)
            # Not by `scatter_`: on CPU it makes 16-bit matrices fp32 temporarily.
            row_u1 = torch.arange(out_uV.shape[0], device=out_uV.device).unsqueeze(1)
            out_uV.index_put_((row_u1, at_uK), value_uK.to(out_uV.dtype))

    def _softmax_at(self, offset_T: Tensor | None, z_tV: Tensor, at_tK: Tensor, rows: slice) -> Tensor:
        """The gradient through the softmax at a few columns, fp64."""
        shift_t = self.stats.shift[rows]
        u_tK = transformed(z_tV.gather(1, at_tK), None, None, self.plan.call.temperature, shift_t.dtype).double()
        u_tK = u_tK - shift_t.unsqueeze(1)
        factor_tK = self._exact.scale[rows].unsqueeze(1)
        if self._exact.slope is not None:
            factor_tK = factor_tK + self._exact.slope[rows].unsqueeze(1) * u_tK.clamp(min=-1e4)
        found_tK = u_tK.exp() * factor_tK
        if offset_T is not None:
            found_tK = found_tK + offset_T[rows].unsqueeze(1) * (u_tK > -torch.inf)
        is_label_tK = at_tK == self.plan.target_T[rows].unsqueeze(1)
        return self._value[rows].double().unsqueeze(1).where(is_label_tK, found_tK)


class KeptGradient:
    """U of the first tokens, and which of them have none: `unit_TV` of the hidden states' dtype, `bad_T` bool.

    A row that is not finite is kept as 0, so that it does no harm where its factor is 0, and `bad`.
    """

    def __init__(self, plan: Plan, source: ComputedLogits, unit_TV: Tensor, bad_T: Tensor):
        self._plan, self._source, self.unit_TV, self.bad_T = plan, source, unit_TV, bad_T
        self.tokens = unit_TV.shape[0]

    def chunks(self) -> list[slice]:
        """Return the chunks of all tokens: none has kept ones and others. On CUDA as many at a time as where dW is
        summed, since a read-out has dozens of launches a chunk."""
        parts = slice(0, self.tokens), slice(self.tokens, self._plan.tokens)
        x_TD, w_VD = self._source.x_TD, self._source.w_VD
        tokens = self._plan.call.chunk_tokens or (chunk_sizes.summed_tokens(w_VD) if x_TD.is_cuda else None)
        options = tokens, w_VD.shape[0], x_TD, 0
        return [rows for part in parts for rows in chunk_sizes.product_chunks(part, *options)]

    def write(self, rows: slice, readout: Any, raw_tV: Any, logits: list[Tensor], stats_Kt: Tensor) -> None:
        """U of a chunk that `readout` has scanned, in the memory of its logits; `raw_tV`: before bias and softcap."""
        if rows.stop > self.tokens:
            return
        out_tV, tokens = logits[0], rows.stop - rows.start
        (value_t, *_), saved = readout.results(None, stats_Kt.unsqueeze(0), stats_Kt)
        readout.pull(saved, slice(0, tokens), logits, torch.ones_like(value_t), out_tV, True)
        out_tV[:, self._plan.call.counted :] = 0
        transform = self._source.transform
        if transform.changes:
            transform.pull(raw_tV, out_tV)
        if not has_values(value_t) or value_t.is_cuda or not value_t.isfinite().all():
            bad_t = ~out_tV.sum(1, dtype=accumulation_dtype(out_tV.dtype)).isfinite()
            self.bad_T[rows] = bad_t
            out_tV.masked_fill_(bad_t.unsqueeze(1), 0)
        if transform.changes or tensors.widens(self._source.x_TD, transform.rounds):
            self.unit_TV[rows] = out_tV

    def add_products(self, grad_T: Tensor | None, out: tuple[Tensor | None, WeightSums, Tensor | None]) -> None:
        """Write dx of the kept tokens, and add what they give to dW and db: `out`, each None where it is not wanted."""
        kept, (dx_TD, sums, total_V), x_TD = self.tokens, out, self._source.x_TD
        g_T = x_TD.new_zeros(kept) if grad_T is None else grad_T[:kept]
        g_T = g_T.to(accumulation_dtype(x_TD.dtype))
        g_T1 = g_T.masked_fill(self.bad_T & (g_T != 0), torch.nan).unsqueeze(1)
        if dx_TD is not None:
            dx_TD[:kept] = matmul.add_product(None, self.unit_TV, self._source.w_VD).mul_(g_T1)
        if sums.wanted:
            # Hidden states of tokens that do not count may be NaN.
            scaled_TD = (x_TD[:kept] * g_T1).masked_fill_(g_T1 == 0, 0).to(x_TD.dtype)
            sums.add(self.unit_TV, scaled_TD)
        if total_V is not None:
            total_V += cpu_products.mm(self.unit_TV.t(), g_T1.to(self.unit_TV.dtype)).squeeze(1)


def of(plan: Plan, source: ComputedLogits) -> KeptGradient | None:
    """Return the memory for the gradients of a call whose logits `source` makes; None: nothing is kept."""
    call, (x_TD, w_VD) = plan.call, (source.x_TD, source.w_VD)
    if len(plan.readouts) != 1 or not plan.readouts[0].by_factor or plan.ranks != 1 or plan.fixed:
        return None
    if torch.compiler.is_compiling():  # which does not take an output of forward in whose memory its products lie
        return None
    tokens = chunk_sizes.kept_tokens(call, plan.tokens, w_VD.shape[0], x_TD)
    if not tokens:
        return None
    source.memory_TV = tensors.new_matrix(x_TD, tokens, w_VD.shape[0])
    return KeptGradient(plan, source, source.memory_TV, torch.zeros(tokens, dtype=torch.bool, device=x_TD.device))
