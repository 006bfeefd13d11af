"""The log-probability of a label among the k largest logits of its token, or among those of them that top-p keeps.

Top-k keeps every logit that is at least the k-th largest, also if more than k are. Top-p keeps a logit of these if the
probability of all larger ones is less than p. Each rank sends its own k largest logits, the number of its columns that
equal the last of these, and the label's logit. From these numbers every rank computes how many columns of all ranks
equal the k-th largest logit, and the sum of the kept exponentials. Each rank finds more candidates than it sends, since
16-bit logits have a few equals of the k-th at most tokens. Only if there are equals besides all candidates, the row of
logits is read again.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K candidates, R ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.head.readouts.gather import integers, largest_columns
from megatron_ext.head.readouts.read_out import Flatten, OfLabels, ReadOutResults
from megatron_ext.head.row_passes.fixed_order_sums import prefix_sums
from megatron_ext.head.row_passes.passes import passes_of
from megatron_ext.numerics.tensors import on_host

# Rows that are sent: the label's logit, the number of columns that equal the k-th candidate, k candidates. Own rows,
# which stay here: the further candidates, and the columns of all candidates.
_LABEL, _EQUAL, _VALUES = 0, 1, 2

# Above this k, k is limited to the vocabulary's size, on which the ranks agree first: else ranks that disagree would
# send messages of different lengths.
_MANY = 4096


class TopKFiltered(OfLabels):
    """Log-probability of each label among those of the `top_k` largest logits that `top_p` keeps: `[...]`, fp32 (fp64
    for fp64); -inf for a label that is not kept, 0 for `ignore_index`. Values and gradients are fp64, rounded once.

    Communicates: nothing beside the common exchange; with a `top_k` above 4096 1 all-gather of the vocabulary's size.
    """

    softmax = False
    needs_logits = True
    by_leaf = True
    reads_labels = False
    keeps_own = True

    def __init__(self, labels: Tensor, top_k: int, top_p: float, ignore_index: int):
        super().__init__(labels, ignore_index)
        self.top_k, self.top_p = top_k, top_p
        self.begins = top_k > _MANY

    def flatten(self, flat: Flatten) -> None:
        super().flatten(flat)
        self.k = min(self.top_k, self.call.vocab.size) if self.begins else self.top_k
        self.candidates = self.k + 8 + self.k // 16
        self.rows, self.own_rows = _VALUES + self.k, 2 * self.candidates - self.k

    def scan(self, rows: slice, logits: Sequence[Tensor], stats_Kt: Tensor, own_Kt: Any) -> None:
        z_tV, vocab = logits[0], self.call.vocab
        found = min(self.candidates, vocab.counted)
        stats_Kt.fill_(-torch.inf)
        stats_Kt[_EQUAL] = 0
        own_Kt[: self.candidates - self.k] = -torch.inf
        columns_Kt = integers(own_Kt)[self.candidates - self.k :]
        labels_t = self.labels_T[rows]
        for at in blocks(z_tV, 8) if found else []:
            z_uV, own_u = z_tV[at, : vocab.counted], vocab.owns(labels_t[at])
            columns_uK = largest_columns(z_uV, found, any_equals=True)
            z_uK = z_uV.gather(1, columns_uK)
            z_Ku = z_uK.t().to(stats_Kt.dtype)
            sent = min(found, self.k)
            stats_Kt[_VALUES : _VALUES + sent, at] = z_Ku[:sent]
            own_Kt[: found - sent, at] = z_Ku[sent:]
            columns_Kt[:found, at] = columns_uK.t().to(columns_Kt.dtype)
            stats_Kt[_EQUAL, at] = passes_of(z_uV).equal_counts(z_uV, z_uK, sent).to(stats_Kt.dtype)
            label_u1 = (labels_t[at] - vocab.start).where(own_u, 0).unsqueeze(1)
            stats_Kt[_LABEL, at] = z_uV.gather(1, label_u1)[:, 0].to(stats_Kt.dtype).where(own_u, -torch.inf)

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        tokens, more = own_KT.shape[1], self.candidates - self.k
        found = min(self.candidates, self.call.vocab.counted)
        columns_TK = integers(own_KT)[more : more + found].t().contiguous()
        probs_TK = own_KT.new_empty(tokens, found, dtype=torch.float64)
        log_prob_T, tied_T = (own_KT.new_empty(tokens, dtype=torch.float64) for _ in range(2))
        kth_T = own_KT.new_empty(tokens)
        for at in blocks(stats_RKT[:, _VALUES:].flatten(0, 1).t()):
            found_t = self._among_candidates(stats_RKT[..., at], own_KT[:more, at], self.counts_T[at])
            log_prob_T[at], probs_tK, kth_T[at], tied_T[at] = found_t
            probs_TK[at] = probs_tK[:, :found]
        return [log_prob_T.to(own_KT.dtype)], [log_prob_T, probs_TK, columns_TK, kth_T, tied_T]

    def _among_candidates(self, stats_RKt: Tensor, own_Kt: Tensor, counts_t: Tensor) -> tuple[Tensor, ...]:
        """Return the labels' log-probability; the probabilities of this rank's candidates; the k-th largest logit; and
        the probability of a logit equal to it, if it is kept and this rank has equals besides its candidates, else 0.

        `own_Kt`: this rank's candidates that were not sent.
        """
        z_RKt = stats_RKt[:, _VALUES:]
        z_tK = z_RKt.flatten(0, 1).t().topk(self.k, 1).values
        kth_t = z_tK[:, -1]
        among_Rt = (z_RKt == kth_t).sum(1)
        equal_t = stats_RKt[:, _EQUAL].where(z_RKt[:, -1] == kth_t, among_Rt).double().sum(0)
        beyond_t = equal_t - (z_tK == kth_t.unsqueeze(1)).sum(1)

        scaled_tK = z_tK.double() / self.call.temperature
        peak_t = scaled_tK[:, 0].where(z_tK[:, 0] > -torch.inf, 0.0)
        exp_tK = (scaled_tK - peak_t.unsqueeze(1)).exp()
        total_t = self.row_sums(exp_tK) + beyond_t * exp_tK[:, -1]
        inside_tK = z_tK > -torch.inf
        if self.top_p < 1:
            before_tK = F.pad(prefix_sums(exp_tK, exp_tK.dtype, self.multiply)[:, :-1], (1, 0))
            inside_tK &= before_tK < self.top_p * total_t.unsqueeze(1)
        last_t1 = inside_tK.sum(1, keepdim=True).clamp(min=1) - 1
        cut_t1 = z_tK.gather(1, last_t1)
        whole_t = cut_t1[:, 0] == kth_t
        sum_t = total_t.where(whole_t, self.row_sums(exp_tK.where(z_tK >= cut_t1, 0.0)))
        lse_t = peak_t + sum_t.masked_fill(sum_t == 0, 1.0).log()  # a row of -inf: its label has -inf, no gradient

        label_t = stats_RKt[:, _LABEL].amax(0)
        there_t = (label_t >= cut_t1[:, 0]) & (label_t > -torch.inf)
        log_prob_t = self._log_prob(label_t, lse_t).where(there_t, -torch.inf).where(counts_t, 0.0)
        sent_Kt = stats_RKt[self.shard_index]
        own_tK = torch.cat([sent_Kt[_VALUES:], own_Kt]).t()
        kept_tK = (own_tK >= cut_t1) & (own_tK > -torch.inf)
        probs_tK = self._log_prob(own_tK, lse_t.unsqueeze(1)).where(kept_tK, -torch.inf).exp()
        own_kth_t = own_tK[:, self.k - 1]
        more_t = sent_Kt[_EQUAL] > (own_tK == own_kth_t.unsqueeze(1)).sum(1)
        tied_t = self._log_prob(kth_t, lse_t).where(whole_t & more_t & (own_kth_t == kth_t), -torch.inf).exp()
        return log_prob_t, probs_tK, kth_t, tied_t

    def _log_prob(self, z: Tensor, lse: Tensor) -> Tensor:
        return z.double() / self.call.temperature - lse

    def at_columns(self, saved: list[Tensor], rows: slice, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and gradients of the candidates and the label: `-g p`, and at the label `g (1 - p)`, with p of the
        softmax over the kept logits."""
        log_prob_t, probs_tK, columns_tK = (x[rows] for x in saved[:3])
        labels_t, g_t = self.labels_T[rows], self._counted(saved, rows, grad)
        vocab = self.call.vocab
        candidates_tK = (-g_t.unsqueeze(1) * probs_tK).where(columns_tK + vocab.start != labels_t.unsqueeze(1), 0.0)
        at_label_t = -g_t * log_prob_t.where(g_t != 0, 0.0).expm1()
        ids_tK = torch.cat([columns_tK + vocab.start, labels_t.where(vocab.owns(labels_t), -1).unsqueeze(1)], 1)
        return ids_tK, torch.cat([candidates_tK, at_label_t.unsqueeze(1)], 1)

    def reads_logits(self, saved: list[Tensor], rows: slice) -> bool:
        """Return whether `pull` may read logits: on a CPU only if a token has equals besides its candidates. On a GPU
        always, since the host would have to wait for the device to know."""
        tied_t = saved[4][rows]
        return not on_host(tied_t) or bool(tied_t.any())

    def pull(
        self, saved: list[Tensor], rows: slice, logits: Sequence[Tensor], grad: Tensor, out_tV: Tensor, first: bool
    ) -> None:
        """Add the gradient of logits that equal a token's k-th logit and are no candidates, found by reading the
        logits."""
        kth_t, tied_t = saved[3][rows], saved[4][rows]
        value_t = -self._counted(saved, rows, grad) * tied_t / self.call.temperature
        columns_tK, counted = saved[2][rows], self.call.vocab.counted
        labels_t = self.labels_T[rows]
        besides_tK = torch.cat([columns_tK, (labels_t - self.call.vocab.start).unsqueeze(1)], 1)
        if first:
            out_tV.zero_()
        kth_t, value_t = kth_t.to(logits[0].dtype), value_t.to(out_tV.dtype)
        passes_of(out_tV).add_at_equals(out_tV[:, :counted], logits[0], kth_t, value_t, besides_tK)

    def _counted(self, saved: list[Tensor], rows: slice, grad: Tensor) -> Tensor:
        """Return the upstream gradient in fp64, 0 for labels that are not kept or do not count."""
        counts_t = (saved[0][rows] > -torch.inf) & self.counts_T[rows]
        return grad[rows].double().where(counts_t, 0.0)
