"""The read-outs of one call together: what the shared pass reads for them, where their rows are, what they give.

Legend: T tokens, K rows of statistics, V columns of this rank's vocabulary shard, R ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from megatron_ext.head.engine import logit_gradient, statistics
from megatron_ext.head.engine.logit_gradient import Basis
from megatron_ext.head.engine.resolved_head import ResolvedHead
from megatron_ext.head.engine.statistics import Statistics
from megatron_ext.head.fixed_bits.leaves import leaf_count
from megatron_ext.head.validation import agreement
from megatron_ext.head.validation.argument_checks import check_exchange
from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.readable_values import has_values

if TYPE_CHECKING:
    from megatron_ext.head.readouts.read_out import ReadOut


class Plan:
    """Read-outs bound to one call.

    Attributes:
        head: that is read.
        call: the same as the passes take it, with the sums that any read-out wants.
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
        leaf_count: into how many leaves chunks of logits are cut, see `fixed_bits/leaves.py`.
        leaves: what `chunked/by_leaf.py` makes of it, once chunks of logits are read.
        rows: statistics of the read-outs' own, of all leaves.
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
        self.softmax = any(r.softmax for r in readouts)
        self.needs_logits = any(r.needs_logits for r in readouts)
        # Read-outs of logits are given those that bias, scale and softcap leave.
        bare = call.without_bends() if self.needs_logits else call.without_scale()
        largest = None if call.softcap is None else call.softcap / max(call.temperature, 1.0)
        sums: dict[str, Any] = {name: any(getattr(r, name) for r in readouts) for name in ("mean", "expected", "hits")}
        self.call = replace(bare, largest=largest, **sums) if largest is not None or any(sums.values()) else bare
        self.readouts = readouts
        for r in readouts:
            r.bind(self.call, flat)
        self.tokens = self.all_tokens = tokens
        self.places_T: Tensor | None = None
        self.held: torch.dtype | None = None
        labels = next((r for r in self.readouts if r.reads_labels), None)
        self.labelled = False
        if labels is None or labels.labels_T is None:
            self.target_T = torch.full((tokens,), -1, device=device)
        elif labels.counts_T is None and call.vocab.counted == call.vocab.size:
            self.target_T = labels.labels_T.clone()  # which the caller may write before backward
            self.labelled = labels.all_count
        else:
            own_T = call.vocab.owns(labels.labels_T)
            if labels.counts_T is not None:
                own_T = own_T & labels.counts_T
            column_T = labels.labels_T - call.vocab.start if call.vocab.start else labels.labels_T
            self.target_T = column_T.masked_fill(~own_T, -1)
        self.ids = self._ids()
        asked = [r.labels_T for r in self.readouts if r.labels_T is not None]
        self.asked: Tensor = asked[0] if asked else self.target_T[:1]
        self.head, self._options = call, options or {}
        self.kept_T = self._kept()
        for r in self.readouts:
            r.masked_later = r.counts_T is self.kept_T
        self.leaf_count = leaf_count(self.call) if self.needs_logits else 1
        self.leaves: Any = None
        times = [self.leaf_count if r.by_leaf else 1 for r in self.readouts]
        sent = [n * r.rows for n, r in zip(times, self.readouts, strict=True)]
        kept = [n * r.own_rows for n, r in zip(times, self.readouts, strict=True)]
        first = statistics.shared_rows(self.call)
        self._spans = [slice(*span) for span in pairwise(accumulate(sent, initial=first))]
        self._own_spans = [slice(*span) for span in pairwise(accumulate(kept, initial=0))]
        count = iter(range(1, len(readouts) + 1))
        self.teachers = [None if r.teacher is None else next(count) for r in readouts]
        self.rows, self.own_rows = sum(sent), sum(kept)

    def _ids(self) -> list[Tensor]:
        found: list[Tensor] = []
        for r in self.readouts:
            counts_T = None if r.counts_T is None or r.labels_T is not None else r.counts_T.long()
            for x in (r.labels_T, counts_T, r.numbers_T):
                if x is not None and not any(x is other for other in found):
                    found.append(x)
        return found

    @cached_property
    def words(self) -> str:
        """What all ranks must pass alike."""
        call = self.head
        found: dict[str, Any] = {"softcap": call.softcap, "temperature": call.temperature}
        found["logit_scale"] = call.logit_scale
        found |= {} if call.bits == "fast" else {"bits": call.bits}
        found |= {"logit_dtype": "16 bits"} if call.rounds else {}
        each = {type(r).__name__: f"({agreement.in_words(r.options())})" for r in self.readouts}
        return agreement.in_words(found | self._options | each)

    def _kept(self) -> Tensor | None:
        kept_T = None
        for r in self.readouts:
            if r.softmax and r.differentiable:
                if r.counts_T is None:
                    return None
                kept_T = r.counts_T if kept_T is None or kept_T is r.counts_T else kept_T | r.counts_T
        return kept_T

    def tensors(self) -> list[Tensor]:
        """Those that backward and a later step of forward read."""
        given = [self.kept_T, *(x for r in self.readouts for x in (r.labels_T, r.counts_T))]
        return [self.target_T, self.asked, *(x for x in given if x is not None)]

    def choose_columns(self) -> None:
        """Has only those logits made that any read-out reads, if they are at most half of this rank's.

        What is sent does not depend on it: each rank decides for itself.
        """
        counted = self.call.vocab.counted
        if not self.tokens or not counted or not has_values(self.target_T) or self.call.fixed:
            return
        if any(teacher is not None for teacher in self.teachers):
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
        """How all ranks must cut the tokens; None: as each likes."""
        found = None
        for r in self.readouts:
            found = found or r.chunks(self.tokens, self.target_T.is_cuda)
        if not found or not self.call.fixed:
            return found
        step = fixed_order.whole_blocks(found[0])
        return [slice(at, min(at + step, self.tokens)) for at in range(0, self.tokens, step)]

    def begin(self, chunks: list[slice], device: torch.device) -> None:
        """What the read-outs must know or agree on before the first chunk."""
        words = self.words if any(r.begins for r in self.readouts) and self.call.ranks > 1 else ""
        for r in self.readouts:
            r.begin(chunks, device, words, self.ids)

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
        if not any(r.exchanges for r in self.readouts):
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
        """What each read-out gives, and what its gradient wants of forward."""
        found, saved = [], []
        for at, (r, span, own) in enumerate(zip(self.readouts, self._spans, self._own_spans, strict=True)):
            sent_RKT, mine_KT = stats_RKT, stats_KT  # a read-out without rows takes the dtype alone
            if r.rows:
                sent_RKT, mine_KT = stats_RKT[:, span, :-1], stats_KT[span, :-1]
            if own_KT is not None and r.own_rows:
                mine_KT = own_KT[own]
            of = r if self.leaves is None or not r.rows else self.leaves.readouts[at]
            given, kept = of.results(stats, sent_RKT, mine_KT)
            found.append(given)
            saved.append(kept)
        return found, saved

    def basis(self, stats: Statistics, saved: list[list[Tensor]], grads: Sequence[Tensor | None]) -> Basis:
        """The gradients of all of them in the form of a function of the softmax."""
        parts = []
        for r, each, grad in zip(self.readouts, saved, grads, strict=True):
            part = None if grad is None else r.basis(stats, each, grad)
            if part is not None:
                parts.append(part)
        return logit_gradient.added(parts)
