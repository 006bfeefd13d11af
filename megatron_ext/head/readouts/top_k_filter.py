"""The log-probability of a label among the k largest logits of its token, or among those of them that top-p keeps.

Kept is every logit that is at least the k-th largest, however many equal it, and of these every one above which lies
less probability than p. Each rank sends its own k largest logits, how many of its columns equal the last of these, and
the label's logit: that says how many columns equal the k-th largest of all, wherever they are, and what all that is
kept adds up to. Each rank finds some candidates more than it sends: logits of 16 bits have a few equals of the k-th at
most tokens, and only where these reach beyond all candidates is the row of logits read again.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K candidates, R ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.head.engine import agreement, statistics
from megatron_ext.head.engine.statistics import REFUSED
from megatron_ext.head.readouts.fixed_order_sums import prefix_sums
from megatron_ext.head.readouts.readout import OWN, Logits, ReadOut
from megatron_ext.head.readouts.vocabulary_order import blocks, largest_columns
from megatron_ext.head.row_passes.logit_passes import accumulation_dtype
from megatron_ext.head.validation.argument_checks import REFUSAL, check_agreement
from megatron_ext.head.validation.readable_values import has_values, raise_if

# Rows after those of `row_statistics`: the label's logit, how many columns equal the k-th candidate, k candidates, and,
# which stay here, further candidates and the columns of all.
_LABEL, _EQUAL, _VALUES = OWN, OWN + 1, OWN + 2

# Above as many, candidates are cut down to the vocabulary, after the ranks have told each other how large it is: else
# ranks that disagree would wait for messages of other lengths.
_MANY = 4096


@dataclass(frozen=True)
class TopKTopP(ReadOut):
    """`[T]`: log-probability of each label among the `top_k` largest logits, of which `top_p` keeps those in front.

    -inf for a label that is not kept, 0 for `ignore_index`. Values and gradients in fp64, rounded once.

    Communicates: 1 all-gather; with a `top_k` above 4096 1 more, of the size of the vocabulary.
    """

    labels_T: Tensor
    top_k: int
    top_p: float

    @property
    def k(self) -> int:
        return self.top_k if self.top_k <= _MANY else min(self.top_k, self.options.vocab.size)

    @property
    def candidates(self) -> int:
        return self.k + 8 + self.k // 16

    @property
    def own_candidates(self) -> int:
        """Those that this rank has."""
        return min(self.candidates, self.options.vocab.counted)

    @property
    def sent(self) -> int:
        """Rows that the other ranks get."""
        return _VALUES + self.k

    @property
    def more(self) -> int:
        return _VALUES - OWN + 2 * self.candidates

    def begin(self, tokens: int, device: torch.device) -> None:
        if self.top_k > _MANY and self.options.ranks > 1 and tokens:
            self._agree(device, self.options.vocab.size)

    def refuse(self, like: Tensor, tokens: int) -> None:
        if self.top_k > _MANY:
            self._agree(like.device, int(REFUSED))
            return
        dtype = accumulation_dtype(like.dtype)
        statistics.refuse(tokens, self.options, dtype, like.device, self.sent)

    def _agree(self, device: torch.device, size: int) -> None:
        own, shared = torch.full((1, 2), size, dtype=torch.int64, device=device), agreement.scalars(self)
        own[:, 1] = agreement.of_options(self.options, **shared) if has_values(own) else 0
        size_R, options_R = collectives.all_gather(own, self.options.group).unbind(1)
        if size == int(REFUSED) or not has_values(size_R):
            return
        raise_if((size_R == int(REFUSED)).any(), REFUSAL)
        raise_if(
            (size_R != size).any(),
            "vocab: the ranks of tp_group must agree on the vocabulary's size; pass the same vocab.size on each",
        )
        check_agreement(options_R, torch.zeros_like(options_R), self.options, **shared)

    def labels(self, tokens: Tensor) -> Tensor:
        return self.labels_T

    def scan(self, logits: Logits, rows: slice, stats_Kt: Tensor) -> None:
        (z_tV,), vocab, found = logits, self.options.vocab, self.own_candidates
        self.own_statistics(z_tV, stats_Kt[:OWN], False)
        stats_Kt[OWN : _VALUES + self.candidates] = -torch.inf
        stats_Kt[_EQUAL] = 0
        columns_Kt = _integers(stats_Kt)[_VALUES + self.candidates :]
        labels_t = self.labels_T[rows]
        for at in blocks(z_tV, 8) if found else []:
            z_uV, own_u = z_tV[at, : vocab.counted], vocab.owns(labels_t[at])
            columns_uK = largest_columns(z_uV, found, any_equals=True)
            z_uK = z_uV.gather(1, columns_uK)
            stats_Kt[_VALUES : _VALUES + found, at] = z_uK.t().to(stats_Kt.dtype)
            columns_Kt[:found, at] = columns_uK.t().to(columns_Kt.dtype)
            stats_Kt[_EQUAL, at] = _equal_to_kth(z_uV, z_uK, min(self.k, found)).to(stats_Kt.dtype)
            label_u1 = (labels_t[at] - vocab.start).where(own_u, 0).unsqueeze(1)
            stats_Kt[_LABEL, at] = z_uV.gather(1, label_u1)[:, 0].to(stats_Kt.dtype).where(own_u, -torch.inf)

    def exchange(self, stats_KT: Tensor, places_T: Tensor | None) -> Tensor:
        return super().exchange(stats_KT[: self.sent], places_T)

    def combine(self, stats_RKT: Tensor, own_KT: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        tokens, found = own_KT.shape[1] - 1, self.own_candidates
        columns_TK = _integers(own_KT)[_VALUES + self.candidates :, :-1][:found].t().long()
        probs_TK = own_KT.new_empty(tokens, found, dtype=torch.float64)
        log_prob_T, tied_T = (own_KT.new_empty(tokens, dtype=torch.float64) for _ in range(2))
        kth_T = own_KT.new_empty(tokens)
        for at in blocks(stats_RKT[:, _VALUES:, :-1].flatten(0, 1).t()):
            own_Kt = own_KT[: _VALUES + self.candidates, :-1][:, at]
            results = self._among_candidates(stats_RKT[..., :-1][..., at], own_Kt, self.labels_T[at])
            log_prob_T[at], probs_tK, kth_T[at], tied_T[at] = results
            probs_TK[at] = probs_tK[:, :found]
        saved = [self.labels_T, log_prob_T, probs_TK, columns_TK, kth_T, tied_T]
        return [log_prob_T.to(own_KT.dtype)], saved

    def _among_candidates(self, stats_RKt: Tensor, own_Kt: Tensor, labels_t: Tensor) -> tuple[Tensor, ...]:
        """Log-probability of the labels; probabilities of this rank's candidates; the k-th largest logit; and the
        probability of each of its equals if it is kept and this rank has more of them than among its candidates, or 0.
        """
        z_RKt = stats_RKt[:, _VALUES:]
        z_tK = z_RKt.flatten(0, 1).t().topk(self.k, 1).values
        kth_t = z_tK[:, -1]
        among_Rt = (z_RKt == kth_t).sum(1)
        equal_t = stats_RKt[:, _EQUAL].where(z_RKt[:, -1] == kth_t, among_Rt).double().sum(0)
        beyond_t = equal_t - (z_tK == kth_t.unsqueeze(1)).sum(1)

        scaled_tK = z_tK.double() / self.options.temperature
        peak_t = scaled_tK[:, 0].where(z_tK[:, 0] > -torch.inf, 0.0)
        exp_tK = (scaled_tK - peak_t.unsqueeze(1)).exp()
        total_t = exp_tK.sum(1) + beyond_t * exp_tK[:, -1]
        inside_tK = z_tK > -torch.inf
        if self.top_p < 1:
            before_tK = F.pad(prefix_sums(exp_tK, exp_tK.dtype)[:, :-1], (1, 0))
            inside_tK &= before_tK < self.top_p * total_t.unsqueeze(1)
        last_t1 = inside_tK.sum(1, keepdim=True).clamp(min=1) - 1
        cut_t1 = z_tK.gather(1, last_t1)
        whole_t = cut_t1[:, 0] == kth_t
        sum_t = total_t.where(whole_t, exp_tK.where(z_tK >= cut_t1, 0.0).sum(1))
        lse_t = peak_t + sum_t.masked_fill(sum_t == 0, 1.0).log()  # a row of -inf: its label has -inf, no gradient

        label_t = stats_RKt[:, _LABEL].amax(0)
        there_t = (label_t >= cut_t1[:, 0]) & (label_t > -torch.inf)
        log_prob_t = self._log_prob(label_t, lse_t).where(there_t, -torch.inf)
        log_prob_t = log_prob_t.where(labels_t != self.options.ignore_index, 0.0)
        own_tK = own_Kt[_VALUES:].t()
        kept_tK = (own_tK >= cut_t1) & (own_tK > -torch.inf)
        probs_tK = self._log_prob(own_tK, lse_t.unsqueeze(1)).where(kept_tK, -torch.inf).exp()
        own_kth_t = own_tK[:, self.k - 1]
        more_t = own_Kt[_EQUAL] > (own_tK == own_kth_t.unsqueeze(1)).sum(1)
        tied_t = self._log_prob(kth_t, lse_t).where(whole_t & more_t & (own_kth_t == kth_t), -torch.inf).exp()
        return log_prob_t, probs_tK, kth_t, tied_t

    def _log_prob(self, z: Tensor, lse: Tensor) -> Tensor:
        return z.double() / self.options.temperature - lse

    def pull(self, logits: Callable[[], Logits], rows: slice, saved: list[Tensor], grad: Tensor, out_tV: Tensor):
        """The candidates', then of tokens whose k-th logit has more equals here theirs, found by reading the logits.

        On CPU, where it costs no wait to see that no token of the chunk has any, they are then not read.
        """
        labels_t, log_prob_t, probs_tK, columns_tK, kth_t, tied_t = (x[rows] for x in saved)
        o, vocab = self.options, self.options.vocab
        out_tV.zero_()
        if vocab.counted == 0:
            return
        counts_t = (log_prob_t > -torch.inf) & (labels_t != o.ignore_index)
        g_t = (grad[rows].double() / o.temperature).where(counts_t, 0.0)
        # Not by `scatter_`: on CPU it makes 16-bit matrices fp32 temporarily.
        row_t1 = torch.arange(out_tV.shape[0], device=out_tV.device).unsqueeze(1)
        out_tV.index_put_((row_t1, columns_tK), (-g_t.unsqueeze(1) * probs_tK).to(out_tV.dtype))
        tied = tied_t.nonzero()[:, 0] if _is_free_to_look(tied_t) else None
        if tied is None or len(tied):
            _fill_equals(out_tV[:, : vocab.counted], logits()[0], kth_t, (-g_t * tied_t), tied)
        own_t1 = (vocab.owns(labels_t) & counts_t).unsqueeze(1)
        at_t1 = (labels_t - vocab.start).unsqueeze(1).where(own_t1, 0)
        log_prob_t = log_prob_t.where(counts_t, 0.0)
        label_t1 = (-g_t * log_prob_t.expm1()).unsqueeze(1).to(out_tV.dtype)
        out_tV.index_put_((row_t1, at_t1), label_t1.where(own_t1, out_tV.gather(1, at_t1)))


def _fill_equals(out_tV: Tensor, z_tV: Tensor, kth_t: Tensor, value_t: Tensor, tied: Tensor | None) -> None:
    """Write a token's value at its columns that equal its k-th logit, where the value is not 0."""
    kth_t, value_t = kth_t.to(z_tV.dtype), value_t.to(out_tV.dtype)
    z_tV = z_tV[:, : out_tV.shape[1]]
    for at in blocks(z_tV) if tied is None else tied.split(64):
        value_u1 = value_t[at].unsqueeze(1)
        equal_uV = (z_tV[at] == kth_t[at].unsqueeze(1)) & (value_u1 != 0)
        out_tV[at] = value_u1.where(equal_uV, out_tV[at])


def _equal_to_kth(z_uV: Tensor, z_uK: Tensor, k: int) -> Tensor:
    """How many columns of each row equal its k-th largest; `z_uK` at least the k largest."""
    kth_u1 = z_uK[:, k - 1 : k]
    count_u = (z_uK == kth_u1).sum(1)
    if z_uK.shape[1] == z_uV.shape[1]:
        return count_u
    if not _is_free_to_look(z_uV):
        return (z_uV == kth_u1).sum(1)
    for rows in (z_uK[:, -1] == kth_u1[:, 0]).nonzero()[:, 0].split(64):
        count_u[rows] = (z_uV[rows] == kth_u1[rows]).sum(1)
    return count_u


def _is_free_to_look(x: Tensor) -> bool:
    """Whether a branch may depend on values without waiting for a device."""
    return has_values(x) and not x.is_cuda


def _integers(stats: Tensor) -> Tensor:
    """The same memory as integers."""
    return stats.view(torch.int64 if stats.dtype == torch.float64 else torch.int32)
