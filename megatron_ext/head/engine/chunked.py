"""Read-outs of logits chunk by chunk, forward and backward: of logits that exist, and of those that a product makes.

`FromLogits` serves every read-out; `FromHidden` those whose gradient wants logits or that have statistics of their own.
The others have `linear.py`, which makes no logits again for what it keeps.

Legend: T tokens, t of a chunk, D hidden size, V columns of this rank's vocabulary shard, K columns, R ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group
from megatron_ext.head.engine import chunk_sizes, logit_gradient, statistics
from megatron_ext.head.engine.autograd import (
    differentiable_once,
    first_of_each,
    give,
    keep_for_backward,
    kept_from_forward,
)
from megatron_ext.head.engine.call import Call
from megatron_ext.head.engine.flatten import in_runs, new_gradient, rows_of
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.engine.statistics import Statistics
from megatron_ext.head.fixed_bits import products
from megatron_ext.head.fixed_bits.leaves import sum_of_ranks
from megatron_ext.head.fixed_bits.source import chunks as fixed_chunks
from megatron_ext.head.readouts import kept_gradient
from megatron_ext.head.readouts.read_out import AtColumns, AtPlaces, Chunk
from megatron_ext.head.row_passes import matmul
from megatron_ext.head.row_passes.dispatch import combined, row_gradient, row_statistics
from megatron_ext.head.row_passes.fixed_order_sums import sums_of_equals
from megatron_ext.head.row_passes.logit_passes import MAX, SUM_EXP, accumulation_dtype, bend, part_of, transformed
from megatron_ext.head.row_passes.vocabulary_order import blocks


class Rule(NamedTuple):
    """What turns a product's logits into those that are read: a bias `[V]` of this rank's columns, scale, softcap."""

    bias_V: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    rounds: bool = False  # whether the product is rounded to the operands' 16 bits
    fixed: bool = False  # whether logits have the same bits whatever other tokens there are

    @property
    def changes(self) -> bool:
        """Whether it does anything."""
        return self.bias_V is not None or self.softcap is not None or self.scale != 1.0

    def applied(self, z_tV: Tensor) -> Tensor:
        """`softcap * tanh(scale * (z + bias) / softcap)`, in the dtype of the passes; `z` itself if nothing changes."""
        if not self.changes:
            return z_tV
        return transformed(z_tV, self.bias_V, self._own_cap, 1.0 / self.scale, accumulation_dtype(z_tV.dtype))

    def pull(self, z_tV: Tensor, out_tV: Tensor) -> None:
        """Turns the gradient of what `applied` gives of `z`, in `out`, into that of `z`."""
        if self._own_cap is not None:
            slope = products.softcap_slope if self.fixed else bend
            out_tV.mul_(slope(z_tV, self.bias_V, self._own_cap, accumulation_dtype(out_tV.dtype)))
        if self.scale != 1.0:
            out_tV.mul_(self.scale)

    @property
    def _own_cap(self) -> float | None:
        """Of the logits before they are multiplied."""
        return None if self.softcap is None else self.softcap / self.scale


class FromLogits(torch.autograd.Function):
    """The results of `plan`'s read-outs from logits `[T, V]`, or as `Flat.rows` has them, one after the other.

    `teachers`: the logits of read-outs that have a teacher, with their rules in `rules` behind the first one, that of
    `z`; they get no gradient. Saves the logits themselves. `into_logits`: backward writes the gradient into their
    memory, once. The ranks' logits may lie in memory in different orders, above all those of an empty shard:
    `plan.places_T` says in which.

    Communicates: forward what the read-outs' exchange does, backward nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        plan: Plan,
        rules: Sequence[Rule],
        into_logits: bool,
        *teachers: Tensor,
    ):
        logits = [z, *teachers]
        shared = plan.chunks()
        chunks = _chunks(logits, plan) if shared is None else shared
        stats, results, saved = _read(plan, _given(logits, rules), chunks, z)
        ctx.rules, ctx.into_logits = rules, into_logits
        keep_for_backward(ctx, plan, logits, stats, saved)
        return give(ctx, plan, results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None):
        logits, stats, saved = kept_from_forward(ctx)
        plan, z = ctx.plan, logits[0]
        gradient = _Gradient(plan, stats, saved, first_of_each(ctx, grads), _given(logits, ctx.rules))
        dz = z.detach() if ctx.into_logits else new_gradient(z)
        for rows in _chunks(logits, plan, copy=not ctx.into_logits):
            gradient.write(rows, rows_of(dz, rows))
        return dz.view(z.shape), *[None] * (2 + len(logits))


class FromHidden(torch.autograd.Function):
    """The results of `plan`'s read-outs from hidden states `[T, D]`, weight `[V, D]` and bias `[V]`, one after the
    other.

    `rules`: softcap and scale of these logits, and whether they are rounded, and of each teacher's. `teachers`: hidden
    states, weight and bias of each read-out's teacher, without a gradient. Never holds more than a chunk of logits of
    each: backward makes them again, 8 T V D FLOPs in all (6 where the gradient needs none), beside those of teachers;
    of what `kept_gradient.py` keeps none. Weight gradients add up in fp32. `sizes`: with the sequence layout, where
    hidden states are this rank's slice, the number of each rank's tokens; else None. `keep`: a backward may follow.

    Communicates, at several ranks: forward what the exchange does, backward one all-reduce of dx. With the sequence
    layout each also gathers the hidden states, with the teachers' in the same collective, and dx is reduce-scattered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        w_VD: Tensor,
        bias_V: Tensor | None,
        plan: Plan,
        rules: Sequence[tuple[float | None, float, bool]],
        sizes: list[int] | None,
        keep: bool,
        *teachers: Tensor | None,
    ):
        inputs: list[Any] = [x_TD, w_VD, bias_V, *teachers]
        with torch.autocast(x_TD.device.type, enabled=False):
            made = _products(inputs, rules, plan.call, sizes)
            kept = kept_gradient.of(plan, made[0]) if keep else None
            shared = plan.chunks()
            if kept is not None:
                chunks = kept.chunks()
            else:
                chunks = _row_chunks(plan, made[0].w_VD.shape[0]) if shared is None else shared
            stats, results, saved = _read(plan, made, chunks, x_TD, kept)
        ctx.rules, ctx.sizes, ctx.chunks = rules, sizes, chunks
        inputs += (None, None) if kept is None else (kept.unit_TV, kept.bad_T)
        # Hooks on saved tensors (offloading, recomputation) hand back another object, without its attributes.
        ctx.parameter = w_VD if plan.call.fuse_main_grad else None
        keep_for_backward(ctx, plan, inputs, stats, saved)
        return give(ctx, plan, results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None):
        inputs, stats, saved = kept_from_forward(ctx)
        with torch.autocast(inputs[0].device.type, enabled=False):
            found = _hidden_gradients(ctx, inputs, stats, saved, first_of_each(ctx, grads))
        return *found, *[None] * (len(inputs) - 1)


def _hidden_gradients(ctx: Any, inputs: list[Any], stats: Any, saved: list[list[Tensor]], grads: list[Tensor | None]):
    plan, sizes, weight_VD, bias_V = ctx.plan, ctx.sizes, inputs[1], inputs[2]
    group, chosen = plan.call.group, plan.call.chosen
    *inputs, unit_TV, bad_T = inputs
    made = _products(inputs, ctx.rules, plan.call, sizes)
    x_TD, w_VD = made[0].x_TD, made[0].w_VD
    gradient = _Gradient(plan, stats, saved, grads, made)
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    fixed, wide = plan.call.bits != "fast", accumulation_dtype(w_VD.dtype)
    dx_TD = x_TD.new_empty(x_TD.shape, dtype=wide if fixed else x_TD.dtype) if need_dx else None
    fused = main_grad.buffer_of(ctx.parameter) if need_dw and plan.call.fuse_main_grad else None
    total_VD = None
    if need_dw:
        total_VD = fused if fused is not None and chosen is None else w_VD.new_zeros(w_VD.shape, dtype=wide)
    total_V = bias_V.new_zeros(w_VD.shape[0], dtype=wide) if need_db else None
    kept = 0 if unit_TV is None else unit_TV.shape[0]
    if kept:
        factor_T = x_TD.new_zeros(kept) if grads[0] is None else grads[0]
        kept_gradient.add_products(unit_TV, bad_T, factor_T, x_TD, w_VD, (dx_TD, total_VD, total_V))
    for rows in ctx.chunks:
        if rows.stop <= kept:
            continue
        if fixed:
            dz_tV = products.new_rows(x_TD, rows.stop - rows.start, w_VD.shape[0])
        else:
            dz_tV = matmul.new_matrix(x_TD, rows.stop - rows.start, w_VD.shape[0])
        gradient.write(rows, dz_tV)
        if dx_TD is not None:
            dx_TD[rows] = products.product(dz_tV, w_VD) if fixed else matmul.add_product(None, dz_tV, w_VD)
        if total_VD is not None and fixed:
            products.add_transposed(total_VD, dz_tV, x_TD[rows])
        elif total_VD is not None:
            main_grad.add_product(total_VD, dz_tV, x_TD[rows])
        if total_V is not None:
            for part_tV in dz_tV.split(products.TOKENS) if fixed else (dz_tV,):
                total_V += part_tV.sum(0, dtype=wide)
        del dz_tV  # before the next one is made
    if dx_TD is not None and fixed:
        dx_TD = sum_of_ranks(dx_TD, x_TD, group, sizes)
    elif dx_TD is not None and plan.tokens:
        if sizes is not None:
            dx_TD = collectives.reduce_scatter(dx_TD, group, sizes=sizes)
        else:
            dx_TD = collectives.all_reduce(dx_TD, group, in_place=True)
    db_V = None if total_V is None else _of_all(total_V.to(bias_V.dtype), bias_V, chosen)
    if fused is not None:
        if chosen is not None and total_VD is not None:
            fused.index_add_(0, chosen, total_VD.to(fused.dtype))
        return dx_TD, main_grad.finish(ctx.parameter, weight_VD.dtype), db_V
    return dx_TD, None if total_VD is None else _of_all(total_VD.to(weight_VD.dtype), weight_VD, chosen), db_V


def _of_all(part: Tensor, like: Tensor, chosen: Tensor | None) -> Tensor:
    """The gradient of all columns, of that of the chosen ones."""
    return part if chosen is None else torch.zeros_like(like).index_copy_(0, chosen, part)


class _Given:
    """Logits that exist."""

    def __init__(self, z: Tensor, rule: Rule):
        self.z, self.rule = z, rule

    def __call__(self, rows: slice) -> Tensor:
        return rows_of(self.z, rows)


class _Product:
    """Logits that the product of hidden states and weight makes, in forward and in backward by the same matmul.

    `repeats`: how many tokens in a row each row of hidden states is of. `memory_TV`: of the first tokens' logits.
    """

    memory_TV: Tensor | None = None

    def __init__(self, x_TD: Tensor, w_VD: Tensor, rule: Rule, repeats: int = 1):
        self.x_TD, self.w_VD, self.rule, self.repeats = x_TD, w_VD, rule, repeats
        if rule.fixed:
            self.x_TD, self.w_VD = products.aligned(x_TD), products.aligned(w_VD)

    def __call__(self, rows: slice) -> Tensor:
        if self.repeats == 1:
            return self._made(rows)
        first = rows.start // self.repeats
        z_tV = self._made(slice(first, -(-rows.stop // self.repeats))).repeat_interleave(self.repeats, 0)
        return z_tV[rows.start - first * self.repeats :][: rows.stop - rows.start]

    def _made(self, rows: slice) -> Tensor:
        if not self.rule.fixed:
            kept_TV = self.memory_TV
            out_tV = kept_TV[rows] if kept_TV is not None and rows.stop <= kept_TV.shape[0] else None
            return matmul.logits(self.x_TD[rows], self.w_VD, out_tV, self.rule.rounds)
        z_tV = products.new_rows(self.x_TD, rows.stop - rows.start, self.w_VD.shape[0])
        products.logits(self.x_TD[rows], self.w_VD, z_tV)
        return z_tV


def _given(logits: Sequence[Tensor], rules: Sequence[Rule]) -> list[Any]:
    return [_Given(z, rule) for z, rule in zip(logits, rules, strict=True)]


def _products(
    inputs: Sequence[Any], rules: Sequence[tuple[float | None, float, bool]], call: Call, sizes: list[int] | None
) -> list[Any]:
    """The student's, and the teachers', with all tokens' hidden states."""
    hidden, weights, biases = [*inputs[::3]], [*inputs[1::3]], [*inputs[2::3]]
    if call.chosen is not None:
        weights[0] = weights[0].index_select(0, call.chosen)
        biases[0] = None if biases[0] is None else biases[0].index_select(0, call.chosen)
    if sizes and any(sizes):
        hidden = gather_tokens(hidden, call.group, sizes)
    found = []
    for x_TD, w_VD, bias_V, rule in zip(hidden, weights, biases, rules, strict=True):
        wide_V = None if bias_V is None else bias_V.to(accumulation_dtype(x_TD.dtype))
        repeats = max(len(hidden[0]) // max(len(x_TD), 1), 1)
        whole = Rule(wide_V, *rule, call.bits != "fast")
        found.append(_Product(x_TD, w_VD.to(x_TD.dtype), whole, repeats))
    return found


def of_each(x_TD: Tensor, tokens: int) -> Tensor:
    """A row for each of `tokens`, of rows that are of several in a row."""
    return x_TD if len(x_TD) == tokens else x_TD.repeat_interleave(tokens // len(x_TD), 0)


def gather_tokens(hidden: list[Tensor], group: Group, sizes: list[int]) -> list[Tensor]:
    """All ranks' tokens of each `[t, D]`, whose D and dtypes may differ, and some of which may have a row for several
    tokens. Communicates: 1 all-gather."""
    if len(hidden) == 1:
        return [collectives.all_gather(hidden[0], group, sizes=sizes)]
    dtypes = [x.dtype for x in hidden]
    alike = all(dtype == dtypes[0] for dtype in dtypes)
    fewest = min(len(x) for x in hidden)
    together = len(hidden[0]) // max(fewest, 1)  # tokens of which one row is sent
    sides = hidden if alike else [x.contiguous().view(torch.uint8) for x in hidden]
    if together > 1:
        sides, sizes = [x.reshape(fewest, -1) for x in sides], [size // together for size in sizes]
    whole = collectives.all_gather(torch.cat(sides, 1), group, sizes=sizes)
    found = [
        x if alike else x.contiguous().view(dtype)
        for x, dtype in zip(whole.split([x.shape[1] for x in sides], 1), dtypes, strict=True)
    ]
    return [x.reshape(-1, own.shape[1]) for x, own in zip(found, hidden, strict=True)]


def _row_chunks(plan: Plan, columns: int) -> list[slice]:
    if plan.call.bits != "fast":
        return fixed_chunks(plan.call, plan.tokens, 0, columns)
    return chunk_sizes.chunks(slice(0, plan.tokens), plan.call.chunk_tokens, columns)


def _chunks(logits: Sequence[Tensor], plan: Plan, copy: bool = True) -> Iterator[slice] | list[slice]:
    """All tokens, by chunks whose rows are the logits' own memory, or copied if they are few; never without `copy`."""
    chunks: Iterable[slice] = plan.chunks() or _row_chunks(plan, logits[0].shape[-1])
    for z in logits:
        chunks = in_runs(z, chunks, copy=copy)
    return [*chunks]


def _read(
    plan: Plan, sources: Sequence[Any], chunks: Iterable[slice], like: Tensor, kept: kept_gradient.Kept | None = None
) -> tuple[Statistics | None, list[list[Tensor]], list[list[Tensor]]]:
    """The shared statistics, the results, and what gradients want of forward."""
    call, dtype, chunks = plan.call, accumulation_dtype(like.dtype), [*chunks]
    plan.begin(chunks if plan.tokens else [], like.device)
    stats_KT = statistics.new_statistics(plan.tokens, call, dtype, like.device, plan.rows)
    own_KT = stats_KT.new_empty(plan.own_rows, plan.tokens)
    shift_T = stats_KT.new_empty(plan.tokens)
    for rows in chunks:
        raw_tV: Any = sources[0](rows)
        logits = [sources[0].rule.applied(raw_tV) if plan.needs_logits else raw_tV]
        raw_tV = None if kept is None else raw_tV  # before the teachers' are made
        logits += _bent(plan, sources[1:], rows)
        stats_Kt = stats_KT[:, rows]
        if plan.softmax:
            row_statistics(
                logits[0],
                part_of(plan.target_T, rows),
                stats_Kt,
                None,
                part_of(shift_T, rows),
                None,
                call.counted,
                call.softcap,
                call.temperature,
                call.mean,
                call.expected,
                call.hits,
            )
        else:
            stats_Kt[MAX : SUM_EXP + 1] = statistics.fingerprint(logits[0], call.counted)
        for at, readout, part_Kt, own_Kt in plan.parts(stats_Kt, own_KT[:, rows]):
            readout.scan(Chunk(rows, _sides(plan, logits, at), part_Kt, own_Kt))
            if kept is not None:
                kept.write(rows, readout, raw_tV, logits, part_Kt)
        del raw_tV, logits  # before the next ones are made
    stats_RKT = plan.exchange(stats_KT)
    stats = combined(stats_RKT, stats_KT, shift_T, call) if plan.softmax else None
    return stats, *plan.results(stats, stats_RKT, stats_KT, own_KT)


def _bent(plan: Plan, sources: Sequence[Any], rows: slice) -> list[Tensor]:
    """The logits of each source, as bias and softcap leave them where read-outs read them."""
    return [source.rule.applied(source(rows)) if plan.needs_logits else source(rows) for source in sources]


def _sides(plan: Plan, logits: list[Tensor], at: int) -> list[Tensor]:
    """The first logits, and those of the teacher of read-out `at`, where it has one."""
    teacher = plan.teachers[at]
    return logits[:1] if teacher is None else [logits[0], logits[teacher]]


class _Softmax(NamedTuple):
    """The gradient through the softmax: what `row_gradient` takes, and its scale and slope in fp64."""

    passed: logit_gradient.PassCoefficients
    value: Tensor  # at the label
    scale: Tensor
    slope: Tensor | None


class _Gradient:
    """The gradient of logits, chunk by chunk: all read-outs' added in it."""

    def __init__(
        self,
        plan: Plan,
        stats: Statistics | None,
        saved: list[list[Tensor]],
        grads: Sequence[Tensor | None],
        sources: Sequence[Any],
    ):
        self.plan, self.sources = plan, sources
        self.stats: Any = stats
        self.given = [
            (at, readout, each, grad)
            for at, (readout, each, grad) in enumerate(zip(plan.readouts, saved, grads, strict=True))
            if grad is not None
        ]
        self.softmax: Any = None
        if stats is not None:
            basis = plan.basis(stats, saved, grads)
            if any(grad_T is not None for grad_T in basis):
                coef = logit_gradient.coefficients(stats, plan.kept_T, basis, plan.call.temperature)
                passed = logit_gradient.pass_coefficients(stats, coef)
                value = (coef.target if coef.d is None else coef.target + coef.d) * logit_gradient.target_bend(stats)
                scale, slope = coef.alpha * coef.a, None
                if coef.c is not None:
                    slope = coef.alpha * coef.c
                    scale = scale + slope * logit_gradient.below_expected(stats, coef.alpha)
                self.softmax = _Softmax(passed, value.to(stats.shift.dtype), scale, slope)

    def write(self, rows: slice, out_tV: Tensor) -> None:
        """Write that of the tokens `rows`."""
        plan, call = self.plan, self.plan.call
        if call.counted == 0:
            out_tV.zero_()
            return
        pulling = [each for each in self.given if each[1].reads_logits(each[2], rows)]
        columns = [readout.at_columns(saved, rows, grad) for _, readout, saved, grad in self.given]
        found = [each for each in columns if each is not None]
        places = [readout.at_places(saved, rows, grad) for _, readout, saved, grad in self.given]
        bent = plan.needs_logits and self.sources[0].rule.changes
        logits = raw_tV = None
        if self.softmax is not None or pulling or bent:
            if bent:
                raw_tV = self.sources[0](rows)
                first_tV = self.sources[0].rule.applied(raw_tV)
                logits = [first_tV, *_bent(plan, self.sources[1:], rows)]
            else:
                logits = _bent(plan, self.sources, rows)
        nothing = True
        if self.softmax is not None and logits is not None:
            self._write_softmax(logits[0], rows, out_tV)
            nothing = False
        if found:
            if nothing:
                out_tV.zero_()
            self._add_at_columns(found, None if logits is None else logits[0], rows, out_tV)
            nothing = False
        for at, readout, saved, grad in pulling:
            assert logits is not None
            readout.pull(saved, rows, _sides(plan, logits, at), grad, out_tV, nothing)
            if nothing:
                out_tV[:, call.counted :] = 0
            nothing = False
        if nothing:
            out_tV.zero_()
        for each in places:
            if each is not None:
                self._add_at_places(each, out_tV)
        if raw_tV is not None:
            self.sources[0].rule.pull(raw_tV, out_tV)

    def _write_softmax(self, z_tV: Tensor, rows: slice, out_tV: Tensor) -> None:
        plan, call = self.plan, self.plan.call
        given = (plan.target_T, self.stats.shift, *self.softmax.passed, self.softmax.value)
        row_gradient(
            z_tV,
            False,
            *(None if x is None else part_of(x, rows) for x in given),
            out_tV,
            None,
            call.counted,
            call.softcap,
            call.temperature,
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
        softmax = self.softmax is not None and z_tV is not None
        for part in blocks(ids_tK, 0.25):
            ids_uK, out_uV = ids_tK[part], out_tV[part]
            own_uK = call.vocab.owns(ids_uK)
            # Column 0 is written too: nothing is added to it.
            at_uK = call.place(ids_uK - call.vocab.start).where(own_uK, 0)
            value_uK = sums_of_equals((grad_tK[part].double() / call.temperature).where(own_uK, 0.0), at_uK)
            if softmax:
                of_all = slice(rows.start + part.start, rows.start + part.stop)
                value_uK = value_uK + self._softmax_at(z_tV[part], at_uK, of_all)
            # Not by `scatter_`: on CPU it makes 16-bit matrices fp32 temporarily.
            row_u1 = torch.arange(out_uV.shape[0], device=out_uV.device).unsqueeze(1)
            out_uV.index_put_((row_u1, at_uK), value_uK.to(out_uV.dtype))

    def _softmax_at(self, z_tV: Tensor, at_tK: Tensor, rows: slice) -> Tensor:
        """The gradient through the softmax at a few columns, fp64."""
        shift_t = self.stats.shift[rows]
        u_tK = transformed(z_tV.gather(1, at_tK), None, None, self.plan.call.temperature, shift_t.dtype).double()
        u_tK = u_tK - shift_t.unsqueeze(1)
        factor_tK = self.softmax.scale[rows].unsqueeze(1)
        if self.softmax.slope is not None:
            factor_tK = factor_tK + self.softmax.slope[rows].unsqueeze(1) * u_tK.clamp(min=-1e4)
        found_tK = u_tK.exp() * factor_tK
        if self.softmax.passed.offset is not None:
            found_tK = found_tK + self.softmax.passed.offset[rows].unsqueeze(1) * (u_tK > -torch.inf)
        is_label_tK = at_tK == self.plan.target_T[rows].unsqueeze(1)
        return self.softmax.value[rows].double().unsqueeze(1).where(is_label_tK, found_tK)
