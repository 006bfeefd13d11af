"""The logits of a chunk: made by a product, transformed, and their gradient: through the softmax, at chosen columns and
places, and by read-outs' `pull`; and the gradient that forward makes and keeps, for a read-out `by_factor`.

On one rank a chunk's own statistics give the gradient of its read-out while the logits of student and teacher are in
memory: it is written over the student's. Backward then makes no logits; the factors g per token are applied to the
results or to the other operands of the products, as in `linear.py`:

    dx = g * (U @ W)        dW = U.T @ (g * x)

Legend: T tokens, t of a chunk, D hidden size, V columns of this rank's vocabulary shard, K columns or statistics. U:
the gradient where g is 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group
from megatron_ext.head.call import chunk_sizes, logit_gradient, matmul
from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.head.call.matmul import add_to_parts, bend, in_one, operand, transformed
from megatron_ext.head.call.resolved_head import FAST, FIXED, Arithmetic, ResolvedHead, leaves_of
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.row_passes.fixed_order_sums import sums_of_equals
from megatron_ext.numerics import fixed_order, tensors
from megatron_ext.numerics.tensors import accumulation_dtype, has_values, new_matrix, part_of, parts_of


class LogitTransform(NamedTuple):
    """Transform of a product's logits into those that are read: bias `[V]` of this rank's columns, scale, softcap."""

    bias_V: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    rounds: bool = False  # whether the product is rounded to the operands' 16 bits

    @property
    def changes(self) -> bool:
        return self.bias_V is not None or self.softcap is not None or self.scale != 1.0

    def applied(self, z_tV: Tensor) -> Tensor:
        """Return `softcap * tanh(scale * (z + bias) / softcap)`, in the dtype of the passes; `z` if nothing changes.

        The stride of rows does not depend on the number of tokens, since the order of kernels' sums depends on it.
        """
        if not self.changes:
            return z_tV
        dtype = accumulation_dtype(z_tV.dtype)
        out_tV = new_matrix(z_tV, z_tV.shape[0], z_tV.shape[1], dtype)
        return transformed(z_tV, self.bias_V, self._own_cap, 1.0 / self.scale, dtype, out_tV)

    def pull(self, z_tV: Tensor, out_tV: Tensor) -> None:
        """Turn `out`, the gradient of `applied(z)`, into the gradient of `z`, in place."""
        if self._own_cap is not None:
            out_tV.mul_(bend(z_tV, self.bias_V, self._own_cap, accumulation_dtype(out_tV.dtype)))
        if self.scale != 1.0:
            out_tV.mul_(self.scale)

    @property
    def _own_cap(self) -> float | None:
        """Return the softcap of the logits before the scale multiplies them."""
        return None if self.softcap is None else self.softcap / self.scale


class ComputedLogits:
    """Logits that the product of hidden states and weight makes, in forward and in backward by the same matmul.

    `repeats`: number of neighbouring tokens that each row of hidden states serves. `memory_TV`: where the first tokens'
    logits are written.
    """

    memory_TV: Tensor | None = None

    def __init__(self, x_TD: Tensor, w_VD: Any, transform: LogitTransform, arithmetic: Arithmetic, repeats: int = 1):
        self.x_TD, self.w_VD, self.transform, self.repeats = x_TD, w_VD, transform, repeats
        self._arithmetic = arithmetic

    def __call__(self, rows: slice) -> Tensor:
        kept_TV, first = self.memory_TV, rows.start // self.repeats
        made = rows if self.repeats == 1 else slice(first, -(-rows.stop // self.repeats))
        out_tV = kept_TV[made] if kept_TV is not None and made.stop <= kept_TV.shape[0] else None
        z_tV = self._arithmetic.logits(self.x_TD[made], self.w_VD, out_tV, self.transform.rounds)
        if self.repeats == 1:
            return z_tV
        return z_tV.repeat_interleave(self.repeats, 0)[rows.start - first * self.repeats :][: rows.stop - rows.start]


def of_hidden(
    inputs: Sequence[Any], transforms: Sequence[LogitTransform], call: ResolvedHead, sizes: list[int] | None
) -> list[list[ComputedLogits]]:
    """Return, for each leaf, the sources of all heads' logits, of all ranks' tokens. `inputs`: hidden states, weight,
    bias and low rank of each head. Communicates: with `sizes` 1 all-gather."""
    hidden, biases = [*inputs[::4]], [*inputs[2::4]]
    weights = [operand(*each) for each in zip(inputs[1::4], inputs[3::4], strict=True)]
    if call.chosen is not None:
        weights[0] = weights[0].index_select(0, call.chosen)
        biases[0] = None if biases[0] is None else biases[0].index_select(0, call.chosen)
    if sizes and any(sizes):
        hidden = gather_tokens(hidden, call.group, sizes)
    leaves = leaves_of(call) if call.bits != "fast" else []
    found: list[list[ComputedLogits]] = [[] for _ in range(max(len(leaves), 1))]
    for x_TD, weight_VD, bias_V, transform in zip(hidden, weights, biases, transforms, strict=True):
        w_VD, repeats = weight_VD.to(x_TD.dtype), max(len(hidden[0]) // max(len(x_TD), 1), 1)
        wide_V = None if bias_V is None else bias_V.to(accumulation_dtype(x_TD.dtype))
        if not leaves:
            found[0].append(ComputedLogits(x_TD, w_VD, transform._replace(bias_V=wide_V), FAST, repeats))
            continue
        x_TD, whole_VD = fixed_order.aligned(x_TD), in_one(w_VD)
        for leaf, made in zip(leaves, found, strict=True):
            own_V = None if wide_V is None else leaf.cut(wide_V)
            made.append(ComputedLogits(x_TD, leaf.cut(whole_VD), transform._replace(bias_V=own_V), FIXED, repeats))
    return found


def of_each(x_TD: Tensor, tokens: int) -> Tensor:
    """Return a row for each of `tokens`, by repeating rows that serve several neighbouring tokens."""
    return x_TD if len(x_TD) == tokens else x_TD.repeat_interleave(tokens // len(x_TD), 0)


def gather_tokens(hidden: list[Tensor], group: Group, sizes: list[int]) -> list[Tensor]:
    """Gather all ranks' rows of each tensor `[t, D]`; D and dtypes may differ, and a row may serve several tokens.
    Communicates: 1 all-gather."""
    if len(hidden) == 1:
        return [collectives.all_gather(hidden[0], group, sizes=sizes)]
    dtypes = [x.dtype for x in hidden]
    alike = all(dtype == dtypes[0] for dtype in dtypes)
    fewest = min(len(x) for x in hidden)
    together = len(hidden[0]) // max(fewest, 1)  # tokens that one sent row has
    sides = hidden if alike else [x.contiguous().view(torch.uint8) for x in hidden]
    if together > 1:
        sides, sizes = [x.reshape(fewest, -1) for x in sides], [size // together for size in sizes]
    whole = collectives.all_gather(torch.cat(sides, 1), group, sizes=sizes)
    found = [
        x if alike else x.contiguous().view(dtype)
        for x, dtype in zip(whole.split([x.shape[1] for x in sides], 1), dtypes, strict=True)
    ]
    return [x.reshape(-1, own.shape[1]) for x, own in zip(found, hidden, strict=True)]


def logits_of_chunk(made: Sequence[Any], rows: slice, keep_raw: bool) -> tuple[Tensor | None, list[Tensor]]:
    """Return the first source's logits before its transform, if `keep_raw`; and each source's transformed logits."""
    raw_tV = made[0](rows)
    found = [made[0].transform.applied(raw_tV)]
    raw_tV = raw_tV if keep_raw else None  # before the teachers' are made
    for teacher in made[1:]:
        found.append(teacher.transform.applied(teacher(rows)))
    return raw_tV, found


class ChunkGradient:
    """The gradient of logits, chunk by chunk: the sum of all read-outs' gradients.

    `made`: the sources of logits. `stats`: the statistics of the softmax, or None. `saved`: the tensors that each
    read-out saved in forward. `grads`: the gradient of each read-out's first result, or None. For the gradient through
    the softmax, `_passed` has the coefficients of `row_gradient`, rounded from the fp64 ones in `_exact`, and `_value`
    the gradient at the label. `_passed` None: no gradient goes through the softmax.
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
            basis = logit_gradient.basis_of(plan.readouts, stats, saved, grads)
            if any(grad_T is not None for grad_T in basis):
                found = logit_gradient.coefficients(stats, plan.kept_T, basis, plan.call.temperature)
                a, c, d, target, alpha = found
                self._exact, dtype = logit_gradient.pass_coefficients(stats, a, c, d, alpha), stats.shift.dtype
                value = logit_gradient.bent_at_target(target if d is None else target + d, stats)
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
        first = self._passed is None and not columns  # the first `pull` overwrites `out`
        if self._passed is not None:
            plan.passes.row_gradient(
                logits[0],
                part_of(plan.target_T, rows),
                part_of(self.stats.shift, rows),
                out_tV,
                *parts_of(rows, *self._passed, self._value),
                counted=call.counted,
                softcap=call.softcap,
                temperature=call.temperature,
                labelled=plan.labelled,
            )
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
                token_n, column_n, grad_n = each
                there = token_n, call.place(column_n)
                value_n = out_tV[there].double() + grad_n / call.temperature  # rounded once
                out_tV.index_put_(there, value_n.to(out_tV.dtype))
        if raw_tV is not None:
            self.made[0].transform.pull(raw_tV, out_tV)

    def _add_at_columns(self, found: Sequence[tuple[Tensor, Tensor]], z_tV: Any, rows: slice, out_tV: Tensor) -> None:
        """Add gradients at token ids in fp64, rounded once: where one id has almost all probability, terms cancel."""
        call = self.plan.call
        ids_tK, grad_tK = found[0] if len(found) == 1 else (torch.cat(each, 1) for each in zip(*found, strict=True))
        for part in blocks(ids_tK, 0.25):
            ids_uK, out_uV = ids_tK[part], out_tV[part]
            own_uK = call.vocab.owns(ids_uK)
            # Other ranks' ids write column 0, unchanged.
            at_uK = call.place(ids_uK - call.vocab.start).where(own_uK, 0)
            value_uK = sums_of_equals((grad_tK[part].double() / call.temperature).where(own_uK, 0.0), at_uK)
            if self._passed is not None and z_tV is not None:
                of_all = slice(rows.start + part.start, rows.start + part.stop)
                value_uK = value_uK + self._softmax_at(self._passed.offset, z_tV[part], at_uK, of_all)
            # `scatter_` would make a temporary fp32 copy of a 16-bit matrix on CPU.
            row_u1 = torch.arange(out_uV.shape[0], device=out_uV.device).unsqueeze(1)
            out_uV.index_put_((row_u1, at_uK), value_uK.to(out_uV.dtype))

    def _softmax_at(self, offset_T: Tensor | None, z_tV: Tensor, at_tK: Tensor, rows: slice) -> Tensor:
        """Return the gradient through the softmax at a few columns, in fp64."""
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
    """The gradient U of the first tokens, `unit_TV` in the hidden states' dtype, and where it is not finite: `bad_T`.

    A row that is not finite is kept as 0, so that it adds nothing if its factor is 0; with another factor it gives NaN.
    """

    def __init__(self, plan: Plan, source: ComputedLogits, unit_TV: Tensor, bad_T: Tensor):
        self._plan, self._source, self.unit_TV, self.bad_T = plan, source, unit_TV, bad_T
        self.tokens = unit_TV.shape[0]

    def chunks(self) -> list[slice]:
        """Return the chunks of all tokens; no chunk has both kept and other tokens. On CUDA chunks are as large as
        where dW is summed, since a read-out has dozens of launches per chunk."""
        parts = slice(0, self.tokens), slice(self.tokens, self._plan.tokens)
        x_TD, w_VD = self._source.x_TD, self._source.w_VD
        tokens = self._plan.call.chunk_tokens or (chunk_sizes.summed_tokens(w_VD) if x_TD.is_cuda else None)
        options = tokens, w_VD.shape[0], x_TD, 0
        return [rows for part in parts for rows in chunk_sizes.product_chunks(part, *options)]

    def write(self, rows: slice, raw_tV: Any, logits: list[Tensor], stats_Kt: Tensor) -> None:
        """Compute U of a scanned chunk in the memory of its logits; `raw_tV`: logits before the transform; `stats`: the
        read-out's own rows."""
        if rows.stop > self.tokens:
            return
        out_tV, tokens, readout = logits[0], rows.stop - rows.start, self._plan.readouts[0]
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

    def add_products(
        self,
        grad_T: Tensor | None,
        dx_TD: Tensor | None,
        totals_VD: Sequence[Tensor | None],
        columns: Sequence[slice],
        total_V: Tensor | None,
    ) -> None:
        """Write dx of the kept tokens, and add their terms to dW of each part of the operand and to db; None: the
        gradient is not wanted."""
        kept, x_TD = self.tokens, self._source.x_TD
        g_T = x_TD.new_zeros(kept) if grad_T is None else grad_T[:kept]
        g_T = g_T.to(accumulation_dtype(x_TD.dtype))
        g_T1 = g_T.masked_fill(self.bad_T & (g_T != 0), torch.nan).unsqueeze(1)
        if dx_TD is not None:
            dx_TD[:kept] = matmul.add_product(None, self.unit_TV, self._source.w_VD).mul_(g_T1)
        if any(total is not None for total in totals_VD):
            # Hidden states of tokens that do not count may be NaN.
            scaled_TD = (x_TD[:kept] * g_T1).masked_fill_(g_T1 == 0, 0).to(x_TD.dtype)
            add_to_parts(totals_VD, self.unit_TV, scaled_TD, columns)
        if total_V is not None:
            total_V += matmul.column_sums(self.unit_TV, g_T1.squeeze(1))


def kept_gradient(plan: Plan, source: ComputedLogits) -> KeptGradient | None:
    """Return the memory for the kept gradient of a read-out `by_factor`, whose logits `source` makes; None: nothing is
    kept."""
    x_TD, w_VD = source.x_TD, source.w_VD
    # torch's compiler does not allow that products are written into the memory of an output of forward.
    if plan.ranks != 1 or plan.fixed or torch.compiler.is_compiling():
        return None
    tokens = chunk_sizes.kept_tokens(plan.call, plan.tokens, w_VD.shape[0], x_TD)
    if not tokens:
        return None
    source.memory_TV = tensors.new_matrix(x_TD, tokens, w_VD.shape[0])
    return KeptGradient(plan, source, source.memory_TV, torch.zeros(tokens, dtype=torch.bool, device=x_TD.device))
