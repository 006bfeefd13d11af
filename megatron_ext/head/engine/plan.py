"""The read-outs of one call together: what the shared pass reads for them, where their rows are, what they give; and
the same leaf by leaf, for read-outs of chunks of logits whose sums over columns are made of each leaf alone.

A leaf is to a read-out what a rank's shard is: it scans the leaf's columns, and what it makes of all shards it makes of
all ranks' leaves, which are the same ones for any number of ranks. `bits="tensor_parallel"` alone has several a rank.

Legend: T tokens, K rows of statistics, V columns of this rank's vocabulary shard, R ranks, N leaves of
all ranks.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed.groups import VocabShard
from megatron_ext.head.call import statistics
from megatron_ext.head.call.resolved_head import FAST, FIXED, ResolvedHead, leaf_count, leaves_of
from megatron_ext.head.call.statistics import Statistics
from megatron_ext.head.readouts.read_out import ReadOut, ReadOutResults
from megatron_ext.head.row_passes.passes import passes_of
from megatron_ext.numerics import tensors
from megatron_ext.numerics.tensors import has_values


class Plan:
    """Read-outs bound to one call.

    Attributes:
        head: that is read.
        call: the same as the passes take it, with the sums that any read-out wants.
        ranks: that share the vocabulary.
        fixed: every sum has one order, which other tokens do not change.
        arithmetic: the products and sums of the call.
        passes: the passes over rows.
        sums: options of `row_statistics`: which sums it takes, and of which logits.
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
        exchanges: whether any read-out's statistics are sent.
        leaf_count: into how many leaves chunks of logits are cut, see `leaves_of`.
        leaves: the same for each leaf alone, where there are several, once chunks of logits are read.
        shared_rows: statistics of the softmax, as many as any call has where several ranks send them.
        rows: statistics of the read-outs' own, of all leaves, behind the shared ones.
        held: the dtype of hidden states that were widened for the call, which they have until backward; None: as they
            are.
    """

    def __init__(
        self,
        readouts: Sequence[ReadOut],
        call: ResolvedHead,
        flat: Any,
        tokens: int,
        like: Tensor,
        options: dict[str, Any] | None = None,
        places: tuple[Tensor | None, int] | None = None,
        held: torch.dtype | None = None,
    ):
        softmax = needs_logits = mean = expected = hits = False
        for r in readouts:
            softmax, needs_logits = softmax or r.softmax, needs_logits or r.needs_logits
            mean, expected, hits = mean or r.mean, expected or r.expected, hits or r.hits
        self.softmax, self.needs_logits = softmax, needs_logits
        # Read-outs of logits are given those that bias, scale and softcap leave.
        taken = call
        if call.logit_scale != 1.0 or call.softcap is not None:
            taken = call.without_bends() if needs_logits else call.without_scale()
        largest = None if call.softcap is None else call.softcap / max(call.temperature, 1.0)
        if largest is not None or mean or expected or hits:
            taken = replace(taken, largest=largest, mean=mean, expected=expected, hits=hits)
        self.head, self.call, self.readouts, self._options = call, taken, readouts, options or {}
        self.sums: dict[str, Any] = {
            "softcap": taken.softcap,
            "temperature": taken.temperature,
            "with_mean": mean,
            "with_entropy": expected,
            "with_hits": hits,
        }
        self.ranks = 1 if call.group is None else call.group.size()
        self.fixed, self.passes = call.bits != "fast", passes_of(like)
        self.arithmetic = FIXED if self.fixed else FAST
        self.tokens, self.held, self.exchanges = tokens, held, True
        self.leaves: list[Plan] = []
        self.places_T, self.all_tokens = (None, tokens) if places is None else places
        labels = None
        for r in readouts:
            r.call = taken
            r.flatten(flat)
            labels = r if labels is None and r.reads_labels else labels
        self._find_targets(labels, like.device)
        self._find_ids()
        self.leaf_count = leaf_count(taken) if needs_logits and self.fixed else 1
        self._lay_out_rows()

    def _find_targets(self, labels: ReadOut | None, device: torch.device) -> None:
        vocab, self.labelled = self.call.vocab, False
        if labels is None or labels.labels_T is None:
            self.target_T = torch.full((self.tokens,), -1, device=device)
        elif labels.counts_T is None and vocab.start == 0 and vocab.stop >= vocab.size:
            self.target_T = labels.labels_T.clone()  # which the caller may write before backward
            self.labelled = labels.all_count
        else:
            stop = min(vocab.stop, vocab.size)
            self.target_T = self.passes.columns_of(labels.labels_T, labels.counts_T, vocab.start, stop)

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
        own_rows = statistics.own_rows(self.call)
        self.shared_rows = own_rows if self.ranks == 1 else max(own_rows, statistics.SENT)
        for r in self.readouts:
            times, sent = self.leaf_count if r.by_leaf else 1, self.shared_rows + self.rows
            self._spans.append(slice(sent, sent + times * r.rows))
            self._own_spans.append(slice(self.own_rows, self.own_rows + times * r.own_rows))
            self.rows, self.own_rows = self.rows + times * r.rows, self.own_rows + times * r.own_rows
            teachers += r.teacher is not None
            self.teachers.append(None if r.teacher is None else teachers)

    def words(self) -> str:
        """Describe the options that must be the same on all ranks."""
        call = self.head
        found: dict[str, Any] = {"softcap": call.softcap, "temperature": call.temperature}
        found["logit_scale"] = call.logit_scale
        found |= {"bits": call.bits} if self.fixed else {}
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
        if not self.tokens or self.fixed or any(self.teachers) or not has_values(self.target_T):
            return
        read: list[Tensor] = []
        for r in self.readouts:
            columns = r.columns()
            if columns is None:
                return
            read.append(columns.reshape(-1))
        chosen, counted = torch.cat(read).unique(), self.call.vocab.counted
        if counted and 2 * chosen.shape[0] <= counted:
            self._take(replace(self.call, chosen=chosen if chosen.shape[0] else chosen.new_zeros(1)))

    def take_a_column(self) -> None:
        """Has one column read that does not count, which is simpler than none, where this rank's shard is empty."""
        size = self.call.vocab.size
        self._take(replace(self.call, vocab=VocabShard(size, size + 1, size), fuse_main_grad=False))

    def _take(self, call: ResolvedHead) -> None:
        self.call = call
        for r in self.readouts:
            r.call = call

    def chunks(self) -> list[slice] | None:
        """Return the cut of the tokens on all ranks; None: any cut."""
        found = None
        for r in self.readouts:
            found = found or (r.chunks(self.tokens, self.target_T.is_cuda) if r.in_step else None)
        return found

    def begin(self, chunks: list[slice], device: torch.device) -> None:
        """Tell the read-outs what they must know or agree on before the first chunk of logits, and cut into leaves."""
        self.exchanges = False
        for r in self.readouts:
            r.parts = chunks
            if r.begins and self.ranks > 1 and chunks:
                r.begin(device, self.words(), self.ids)
            self.exchanges = self.exchanges or r.exchanges
        self.leaves = self._cut() if self.leaf_count > 1 else []

    def raise_on_all_ranks(self, fault: ValueError, dtype: torch.dtype, device: torch.device) -> NoReturn:
        """Raises `fault` once the other ranks know of it, by the exchange that they are waiting for."""
        if self.ranks > 1 and self.all_tokens:
            begins = next((r for r in self.readouts if r.begins), None)
            if begins is not None:
                begins.refuse(device)
            else:
                size = self.all_tokens, self.shared_rows, self.ranks, dtype, device, self.rows
                refused_KT = statistics.new_statistics(*size).fill_(statistics.REFUSED)
                statistics.gathered(refused_KT, self.call, None, self.all_tokens)
        raise fault

    def exchange(self, stats_KT: Tensor) -> Tensor:
        """Every rank's statistics, signed, `[R, K, T + 1]`. Communicates: 1 all-gather; none at one rank or T = 0.

        Raises:
            ValueError: ranks passed different options or labels, or shards that do not make up the vocabulary.
        """
        if self.ranks == 1 or not self.exchanges or not self.all_tokens:
            return stats_KT.unsqueeze(0)
        return self._exchanged(stats_KT)

    def exchange_chunk(self, stats_Kt: Tensor, first: bool) -> Tensor:
        """Every rank's statistics of a chunk of tokens, `[R, K, t + 1]`. Communicates: 1 all-gather.

        The first chunk is sent as wide as all tokens together, checked for all chunks, and raises as `exchange`: a rank
        that makes its gradient in backward, which sends all tokens at once, or cuts other chunks, is told so.
        """
        if self.ranks == 1:
            return stats_Kt.unsqueeze(0)
        tokens = stats_Kt.shape[1] - 1
        if not first:
            statistics.sign(stats_Kt, self.call.vocab)
            return statistics.gathered(stats_Kt, self.call, None, tokens)
        sent_KT = F.pad(stats_Kt[:, :-1], (0, self.tokens + 1 - tokens))
        return self._exchanged(sent_KT, tokens)

    def _exchanged(self, stats_KT: Tensor, chunk: int | None = None) -> Tensor:
        """Every rank's statistics, checked if this rank can read them; of the first `chunk` tokens, where forward makes
        gradients by such chunks."""
        checksums: list[Any] = []
        if readable := tensors.has_values(stats_KT):
            by_chunks = "" if chunk is None else f", gradients made in forward by chunks of {chunk} tokens"
            words = self.words() + by_chunks
            checksums = [statistics.options_checksum(words), self.passes.labels_checksum(self.ids, self.places_T)]
        statistics.sign(stats_KT, self.call.vocab, *checksums)
        stats_RKT = statistics.gathered(stats_KT, self.call, self.places_T, self.all_tokens)
        if chunk is not None:
            stats_RKT = torch.cat([stats_RKT[..., :chunk], stats_RKT[..., -1:]], -1)
        if readable:
            self.passes.check_exchange(stats_RKT, self.asked, self.call, words)
        return stats_RKT

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
            if self.leaves and r.rows and r.by_leaf:
                given, kept = self._results_of_leaves(at, stats, sent_RKT, mine_KT)
            else:
                given, kept = r.results(stats, sent_RKT, mine_KT)
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

    def _cut(self) -> "list[Plan]":
        """The plan of each leaf's columns alone."""
        plans = [copy.copy(self) for _ in range(self.leaf_count)]
        for number, (part, leaf) in enumerate(zip(plans, leaves_of(self.call), strict=True)):
            part.call, part.target_T = replace(self.call, vocab=leaf.vocab, leaf=number), leaf.columns(self.target_T)
            part.labelled = False
            part.readouts = [r.of_leaf(part.call) for r in self.readouts]
        return plans

    def sides_of(self, at: int, logits: list[Tensor]) -> list[Tensor]:
        """The first logits, and those of the teacher of read-out `at`, where it has one."""
        teacher = self.teachers[at]
        return logits[:1] if teacher is None else [logits[0], logits[teacher]]

    def scan(self, rows: slice, logits: Sequence[list[Tensor]], stats_Kt: Tensor, own_KT: Tensor | None) -> None:
        """Has each read-out write its own rows, one leaf's after the other's: those that are sent, `[K, t]`, and those
        that stay, `[K, T]`, if any do. `logits`: of each leaf."""
        for at, (r, span, own) in enumerate(zip(self.readouts, self._spans, self._own_spans, strict=True)):
            if not r.rows:
                continue
            sent_Kt, own_Kt = stats_Kt[span], None if own_KT is None else own_KT[own, rows]
            if not self.leaves:
                r.scan(rows, self.sides_of(at, logits[0]), sent_Kt, own_Kt)
                continue
            sides = [self.sides_of(at, each) for each in logits]
            if not r.by_leaf:
                r.scan(rows, [torch.cat(each, 1) for each in zip(*sides, strict=True)], sent_Kt, own_Kt)
                continue
            owns = [None] * self.leaf_count if own_Kt is None else own_Kt.chunk(self.leaf_count)
            chunks = [(rows, *each) for each in zip(sides, sent_Kt.chunk(self.leaf_count), owns, strict=True)]
            r.scan_leaves([part.readouts[at] for part in self.leaves], chunks)

    def _results_of_leaves(self, at: int, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        """Return the results of read-out `at`; each leaf's saved tensors follow, where leaves keep others."""
        count, each = self.leaf_count, [part.readouts[at] for part in self.leaves]
        stats_NKT = stats_RKT.unflatten(1, (count, -1)).flatten(0, 1)
        first, *others = zip(each, own_KT.chunk(count), strict=True)
        given, saved = first[0].results(stats, stats_NKT, first[1])
        if self.readouts[at].keeps_own:
            saved = [*saved, *(x for leaf, own in others for x in leaf.results(stats, stats_NKT, own)[1])]
        return given, saved

    def saved_of(self, number: int, saved: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Return of each read-out one leaf's part of what `results` has saved."""
        found = []
        for r, each in zip(self.readouts, saved, strict=True):
            count = len(each) // self.leaf_count if r.by_leaf and r.keeps_own else 0
            found.append(each[number * count : (number + 1) * count] if count else each)
        return found
