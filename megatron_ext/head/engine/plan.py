"""The read-outs of one call together: what the shared pass reads for them, where their rows are, what they give; and
the same leaf by leaf, for read-outs of chunks of logits whose sums over columns are made of each leaf alone.

A leaf is to a read-out what a rank's shard is: it scans the leaf's columns, and what it makes of all shards it makes of
all ranks' leaves, which are the same ones for any number of ranks. `bits="tensor_parallel"` alone has several a rank.

Legend: T tokens, K rows of statistics, V columns of this rank's vocabulary shard, R ranks, N leaves of
all ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from megatron_ext.head.call import logit_gradient, statistics
from megatron_ext.head.call.logit_gradient import Basis
from megatron_ext.head.call.resolved_head import FAST, FIXED, ResolvedHead, leaf_count
from megatron_ext.head.call.statistics import Statistics, check_exchange
from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.readable_values import has_values

if TYPE_CHECKING:
    from megatron_ext.head.readouts.read_out import ReadOut
import copy

from megatron_ext.head.call.resolved_head import leaves_of
from megatron_ext.head.readouts.read_out import Chunk, Found


class Plan:
    """Read-outs bound to one call.

    Attributes:
        head: that is read.
        call: the same as the passes take it, with the sums that any read-out wants.
        arithmetic: its products and sums.
        readouts: copies of the caller's, in the order in which they were asked for.
        tokens: T.
        softmax: whether any wants the softmax of whole rows.
        needs_logits: whether a gradient may want logits, or a read-out has rows of its own: chunk by chunk then.
        teachers: of each read-out which logits are its teacher's: a place behind those that are read; None: none.
        target_T: the column of each label whose logit the shared pass reads, -1 where this rank has none.
        labelled: whether it is seen that this rank has the column of every label.
        kept_T: bool, the tokens that may have a gradient through the softmax; None: all.
        ids: token ids that the call asks for, and which tokens count: all ranks must ask for the same.
        asked: one of them: an id past a rank's columns shows that it has a shard, not the whole.
        all_tokens: how many tokens all ranks know of, if some were left out, at `places_T` of which these are.
        leaf_count: into how many leaves chunks of logits are cut, see `leaves_of`.
        leaves: `Leaves` of it, once chunks of logits are read.
        rows: statistics of the read-outs' own, of all leaves, behind the `shared_rows` of the softmax.
        held: the dtype of hidden states that were widened for the call, which they have until backward; None: as they
            are.
    """

    def __init__(
        self,
        readouts: "Sequence[ReadOut]",
        call: ResolvedHead,
        flat: Any,
        tokens: int,
        device: torch.device,
        options: dict[str, Any] | None = None,
    ):
        softmax = needs_logits = mean = expected = hits = False
        for r in readouts:
            softmax, needs_logits = softmax or r.softmax, needs_logits or r.needs_logits
            mean, expected, hits = mean or r.mean, expected or r.expected, hits or r.hits
        self.softmax, self.needs_logits = softmax, needs_logits
        # Read-outs of logits are given those that bias, scale and softcap leave.
        taken = call.without_bends() if needs_logits else call if call.logit_scale == 1.0 else call.without_scale()
        largest = None if call.softcap is None else call.softcap / max(call.temperature, 1.0)
        if largest is not None or mean or expected or hits:
            taken = replace(taken, largest=largest, mean=mean, expected=expected, hits=hits)
        self.head, self.call, self.readouts, self._options = call, taken, readouts, options or {}
        self.arithmetic = FAST if call.bits == "fast" else FIXED
        self.tokens = self.all_tokens = tokens
        self.places_T: Tensor | None = None
        self.held: torch.dtype | None = None
        self.leaves: Any = None
        labels = None
        for r in readouts:
            r.call = taken
            r.flatten(flat)
            labels = r if labels is None and r.reads_labels else labels
        self._find_targets(labels, device)
        self._find_ids()
        self.leaf_count = leaf_count(taken) if needs_logits else 1
        self._lay_out_rows()

    def _find_targets(self, labels: "ReadOut | None", device: torch.device) -> None:
        vocab, self.labelled = self.call.vocab, False
        if labels is None or labels.labels_T is None:
            self.target_T = torch.full((self.tokens,), -1, device=device)
        elif labels.counts_T is None and vocab.start == 0 and vocab.stop >= vocab.size:
            self.target_T = labels.labels_T.clone()  # which the caller may write before backward
            self.labelled = labels.all_count
        else:
            own_T = vocab.owns(labels.labels_T)
            if labels.counts_T is not None:
                own_T = own_T & labels.counts_T
            column_T = labels.labels_T - vocab.start if vocab.start else labels.labels_T
            self.target_T = column_T.masked_fill(~own_T, -1)

    def _find_ids(self) -> None:
        """Find the token ids that the call asks for, and the tokens that may have a gradient."""
        ids: list[Tensor] = []
        kept_T, all_kept, asked = None, False, None
        for r in self.readouts:
            counts_T = r.counts_T
            asks = r.labels_T if r.labels_T is not None or counts_T is None else counts_T.long()
            for x in (asks, r.numbers_T):
                if x is not None and not (ids and any(x is other for other in ids)):
                    ids.append(x)
            asked = r.labels_T if asked is None else asked
            if r.softmax and r.differentiable:
                all_kept = all_kept or counts_T is None
                kept_T = counts_T if kept_T is None or kept_T is counts_T or counts_T is None else kept_T | counts_T
        self.ids, self.asked = ids, self.target_T[:1] if asked is None else asked
        self.kept_T = None if all_kept else kept_T
        for r in self.readouts:
            r.masked_later = r.counts_T is self.kept_T

    def _lay_out_rows(self) -> None:
        """The place of each read-out's own rows among those that are sent and those that stay, and its teacher's."""
        self._spans, self._own_spans, self.teachers = [], [], []
        self.rows = self.own_rows = teachers = 0
        self.shared_rows = statistics.shared_rows(self.call)
        for r in self.readouts:
            times, sent = self.leaf_count if r.by_leaf else 1, self.shared_rows + self.rows
            self._spans.append(slice(sent, sent + times * r.rows))
            self._own_spans.append(slice(self.own_rows, self.own_rows + times * r.own_rows))
            self.rows, self.own_rows = self.rows + times * r.rows, self.own_rows + times * r.own_rows
            teachers += r.teacher is not None
            self.teachers.append(None if r.teacher is None else teachers)

    @cached_property
    def words(self) -> str:
        """Describe the options that must be the same on all ranks."""
        call = self.head
        found: dict[str, Any] = {"softcap": call.softcap, "temperature": call.temperature}
        found["logit_scale"] = call.logit_scale
        found |= {} if call.bits == "fast" else {"bits": call.bits}
        found |= {"logit_dtype": "16 bits"} if call.rounds else {}
        found |= self._options
        for r in self.readouts:
            found[type(r).__name__] = f"({statistics.in_words(r.options())})"
        return statistics.in_words(found)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that backward and a later step of forward read."""
        given = [self.kept_T, *(x for r in self.readouts for x in (r.labels_T, r.counts_T))]
        return [self.target_T, self.asked, *(x for x in given if x is not None)]

    def choose_columns(self) -> None:
        """Has only those logits made that any read-out reads, if they are at most half of this rank's.

        What is sent does not depend on it: each rank decides for itself.
        """
        counted = self.call.vocab.counted
        if not self.tokens or not counted or not has_values(self.target_T) or self.call.fixed:
            return
        if any(self.teachers):
            return
        read: list[Tensor] = []
        for r in self.readouts:
            columns = r.columns()
            if columns is None:
                return
            read.append(columns.reshape(-1))
        chosen = torch.cat(read).unique()
        if 2 * chosen.shape[0] > counted:
            return
        self.call = replace(self.call, chosen=chosen if chosen.shape[0] else chosen.new_zeros(1))
        for r in self.readouts:
            r.call = self.call

    def chunks(self) -> list[slice] | None:
        """Return the cut of the tokens on all ranks; None: any cut."""
        found = None
        for r in self.readouts:
            found = found or r.chunks(self.tokens, self.target_T.is_cuda)
        if not found or not self.call.fixed:
            return found
        step = fixed_order.whole_blocks(found[0])
        return [slice(at, min(at + step, self.tokens)) for at in range(0, self.tokens, step)]

    def begin(self, chunks: list[slice], device: torch.device) -> None:
        """Tell the read-outs what they must know or agree on before the first chunk."""
        for r in self.readouts:
            r.begin(chunks, device, self.words if r.begins and self.call.ranks > 1 else "", self.ids)

    def raise_on_all_ranks(self, fault: ValueError, dtype: torch.dtype, device: torch.device) -> NoReturn:
        """Raises `fault` once the other ranks know of it, by the exchange that they are waiting for."""
        if self.call.ranks > 1 and self.all_tokens:
            begins = next((r for r in self.readouts if r.begins), None)
            if begins is not None:
                begins.refuse(device)
            else:
                statistics.refuse(self.all_tokens, self.call, dtype, device, self.rows)
        raise fault

    def exchange(self, stats_KT: Tensor) -> Tensor:
        """Every rank's statistics, `[R, K, T + 1]`. Communicates: 1 all-gather; see `statistics.exchange`.

        Raises:
            ValueError: ranks passed different options or labels, or shards that do not make up the vocabulary.
        """
        if self.call.ranks == 1 or not any(r.exchanges for r in self.readouts):
            return stats_KT.unsqueeze(0)
        statistics.sign(stats_KT, self.call, lambda: self.words, self.ids, self.places_T)
        stats_RKT = statistics.exchange(stats_KT, self.call, self.places_T, self.all_tokens)
        if stats_RKT.shape[0] > 1 and not torch.compiler.is_compiling():
            check_exchange(stats_RKT, self.asked, self.call, self.words)
        return stats_RKT

    def parts(self, stats_Kt: Tensor, own_KT: Tensor | None, rows: slice) -> list[tuple[int, Tensor, Any]]:
        """The place of each read-out with rows of its own, those that are sent and those that stay, if any do."""
        spans = enumerate(zip(self.readouts, self._spans, self._own_spans, strict=True))
        return [
            (at, stats_Kt[span], None if own_KT is None else own_KT[own, rows])
            for at, (r, span, own) in spans
            if r.rows
        ]

    def results(
        self, stats: Statistics | None, stats_RKT: Tensor, stats_KT: Tensor, own_KT: Tensor | None = None
    ) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return what each read-out gives, and what its gradient wants of forward."""
        found, saved = [], []
        for at, (r, span, own) in enumerate(zip(self.readouts, self._spans, self._own_spans, strict=True)):
            sent_RKT, mine_KT = stats_RKT, stats_KT  # a read-out without rows takes the dtype alone
            if r.rows:
                sent_RKT, mine_KT = stats_RKT[:, span, :-1], stats_KT[span, :-1]
            if own_KT is not None and r.own_rows:
                mine_KT = own_KT[own]
            if self.leaves is None or not r.rows:
                given, kept = r.results(stats, sent_RKT, mine_KT)
            else:
                given, kept = self.leaves.results(at, stats, sent_RKT, mine_KT)
            found.append(given)
            saved.append(kept)
        return found, saved

    def give(self, ctx: Any, results: list[list[Tensor]]) -> tuple[Tensor, ...]:
        """Return all results one after the other, for autograd: the first of a read-out alone may have a gradient.

        `ctx.firsts`: the place of each read-out's first result among all gradients, -1 of one that has none.
        """
        found: list[Tensor] = []
        plain: list[Tensor] = []
        ctx.firsts = []
        for r, each in zip(self.readouts, results, strict=True):
            ctx.firsts.append(len(found) if r.differentiable else -1)
            found += each
            plain += each[1:] if r.differentiable else each
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*plain)
        return tuple(found)

    def basis(self, stats: Statistics, saved: list[list[Tensor]], grads: Sequence[Tensor | None]) -> Basis:
        """The gradients of all of them in the form of a function of the softmax."""
        parts = []
        for r, each, grad in zip(self.readouts, saved, grads, strict=True):
            part = None if grad is None else r.basis(stats, each, grad)
            if part is not None:
                parts.append(part)
        return parts[0] if len(parts) == 1 else logit_gradient.added(parts)


class Leaves:
    """Leaves of a plan, and its read-outs, each at its place `at`, as they take statistics of all leaves.

    Attributes:
        plans: the same for the leaf's columns alone.
    """

    def __init__(self, plan: Plan):
        self.plans = [copy.copy(plan) for _ in range(plan.leaf_count)]
        for number, (part, leaf) in enumerate(zip(self.plans, leaves_of(plan.call), strict=True)):
            part.call, part.target_T = replace(plan.call, vocab=leaf.vocab, leaf=number), leaf.columns(plan.target_T)
            part.labelled = False
            part.readouts = [r.of_leaf(part.call) for r in plan.readouts]
        self._whole = plan.readouts

    def scan(self, at: int, rows: slice, logits: Sequence[Sequence[Tensor]], stats_Kt: Tensor, own_Kt: Any) -> None:
        """Writes a read-out's rows, one leaf's after the other's. `logits`: of each leaf, those that it reads."""
        if not self._whole[at].by_leaf:
            whole = [torch.cat(each, 1) for each in zip(*logits, strict=True)]
            self._whole[at].scan(Chunk(rows, whole, stats_Kt, own_Kt))
            return
        count = len(self.plans)
        own = [None] * count if own_Kt is None else own_Kt.chunk(count)
        chunks = [Chunk(rows, *each) for each in zip(logits, stats_Kt.chunk(count), own, strict=True)]
        self._whole[at].scan_leaves([part.readouts[at] for part in self.plans], chunks)

    def results(self, at: int, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> Found:
        """Return the results as `ReadOut.results` does; each leaf's saved tensors follow, where leaves keep others."""
        if not self._whole[at].by_leaf:
            return self._whole[at].results(stats, stats_RKT, own_KT)
        count = len(self.plans)
        stats_NKT = stats_RKT.unflatten(1, (count, -1)).flatten(0, 1)
        each = [part.readouts[at] for part in self.plans]
        first, *others = zip(each, own_KT.chunk(count), strict=True)
        given, saved = first[0].results(stats, stats_NKT, first[1])
        if self._whole[at].keeps_own:
            saved = [*saved, *(x for leaf, own in others for x in leaf.results(stats, stats_NKT, own)[1])]
        return given, saved

    def saved_of(self, number: int, saved: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Return of each read-out one leaf's part of what `results` has saved."""
        found = []
        for r, each in zip(self._whole, saved, strict=True):
            count = len(each) // len(self.plans) if r.by_leaf and r.keeps_own else 0
            found.append(each[number * count : (number + 1) * count] if count else each)
        return found
