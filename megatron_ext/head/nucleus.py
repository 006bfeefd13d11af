"""What top-k and top-p leave of a distribution, and the log-probability of a label under it.

Top-k keeps the k first of the vocabulary in the order of `order.py`; top-p then keeps the shortest prefix of those in
front whose probability, renormalised, reaches p, and at least one. With top-k the candidates of all ranks say it all.
Top-p alone may keep the whole vocabulary: each rank gets some of a chunk's tokens whole, cuts them, and tells the
others where: the last logit and id kept, and the lse of what is kept.

Legend: T tokens, t of a chunk, u of a chunk on this rank, V columns of this rank's vocabulary shard, K candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank
from megatron_ext.head.checks import REFUSAL
from megatron_ext.head.options import HeadOptions
from megatron_ext.head.order import blocks, ordered
from megatron_ext.head.passes import row_gradient
from megatron_ext.head.read_outs import OWN, Logits, ReadOut
from megatron_ext.head.rows import accumulation_dtype
from megatron_ext.head.statistics import REFUSED
from megatron_ext.head.values import has_values, raise_if

# What is known of a token once it is cut: the last logit kept and its id (as bits), the scaled maximum, the log of the
# sum of exponentials from there, and the label's log-probability.
_CUT, _LAST, _PEAK, _LOG_SUM, _LOG_PROB = range(5)
_CUTS = 5


def candidates_log_probs(z_TK: Tensor, ids_TK: Tensor, labels_T: Tensor, top_p: float, ignore_index: int) -> Tensor:
    """`[T]`: log-probability of each label among candidates in falling order, or of those that top-p leaves.

    -inf for a label that is not there or has no probability, 0 for `ignore_index`. Differentiable.
    """
    z_TK = z_TK.where(z_TK[:, :1] > -torch.inf, 0.0)  # a row of -inf has no distribution, and no NaN either
    if top_p < 1:
        z_TK = z_TK.masked_fill(~_inside(z_TK.detach().softmax(-1), top_p), -torch.inf)
    here_TK = (ids_TK == labels_T.unsqueeze(1)) & (z_TK > -torch.inf)
    found_T = z_TK.log_softmax(-1).where(here_TK, 0.0).sum(-1)
    return found_T.where(here_TK.any(-1), -torch.inf).where(labels_T != ignore_index, 0.0)


@dataclass(frozen=True)
class TopP(ReadOut):
    """`[T]`: log-probability of each label among those first of the whole vocabulary that reach `top_p`.

    Communicates, at several ranks: 1 all-to-all and 1 all-gather for each chunk.
    """

    labels_T: Tensor
    top_p: float

    more = _CUTS

    @property
    def width(self) -> int:
        """The columns of rank 0, which every rank sends, padded."""
        return _width(self.options)

    def scan(self, logits: Logits, rows: slice, stats_Kt: Tensor) -> None:
        stats_Kt[:OWN] = 0
        stats_Kt[OWN:] = self._cuts(logits[0], self.labels_T[rows], self.options.vocab.size)

    def refuse(self, like: Tensor, tokens: int) -> None:
        first = self.chunks(tokens, like.device)[0]
        self._cuts(like.new_zeros(first.stop, 0), self.labels_T[first], REFUSED)

    def exchange(self, stats_KT: Tensor) -> Tensor:
        """Nothing is left to say: every chunk's cuts are known everywhere."""
        return stats_KT.unsqueeze(0)

    def combine(self, stats_RKT: Tensor, own_KT: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        cuts_KT = own_KT[OWN:, :-1]
        log_prob_T = cuts_KT[_LOG_PROB].where(self.labels_T != self.options.ignore_index, 0.0)
        return [log_prob_T], [self.labels_T, cuts_KT.t()]

    def pull(self, logits: Callable[[], Logits], rows: slice, saved: list[Tensor], grad: Tensor, out_tV: Tensor):
        labels_t, cuts_tK = (x[rows] for x in saved)
        o, vocab = self.options, self.options.vocab
        cut_t, last_t, peak_t, log_sum_t, log_prob_t = cuts_tK.unbind(1)
        counts_t = (log_prob_t > -torch.inf) & (labels_t != o.ignore_index)
        g_t = (grad[rows] / o.temperature).where(counts_t, 0.0).to(cuts_tK.dtype)
        at_label_t = -g_t * log_prob_t.where(counts_t, 0.0).expm1()
        target_t = (labels_t - vocab.start).where(vocab.owns(labels_t) & counts_t, -1)
        scale_t = -g_t * log_sum_t.neg().exp()
        ids_V = torch.arange(vocab.counted, device=out_tV.device) + vocab.start
        z_tV = logits()[0][:, : vocab.counted]
        for at in blocks(z_tV):
            inside = _not_after(z_tV[at], ids_V, cut_t[at].unsqueeze(1), _integers(last_t[at]).unsqueeze(1))
            kept = z_tV[at].masked_fill(~inside, -torch.inf)
            coefficients = (peak_t[at], scale_t[at], None, None, at_label_t[at])
            row_gradient(kept, False, target_t[at], *coefficients, out_tV[at], None, vocab.counted, None, o.temperature)

    def _cuts(self, z_tV: Tensor, labels_t: Tensor, size: float) -> Tensor:
        """`[_CUTS, t]`: where each token is cut. `size`: what this rank takes the vocabulary to be, or REFUSED."""
        group, tokens, dtype = self.options.group, labels_t.shape[0], accumulation_dtype(z_tV.dtype)
        z_uV, labels_u = self._whole_rows(z_tV, labels_t)
        cuts_Ku = z_uV.new_zeros(_CUTS + 1, labels_u.shape[0], dtype=dtype)
        cuts_Ku[_CUTS] = size
        for at in blocks(z_uV) if size != REFUSED else []:
            self._cut(z_uV[at, : self.options.vocab.size], labels_u[at], cuts_Ku[:_CUTS, at])
        cuts_Kt = collectives.all_gather(cuts_Ku, group, dim=1)
        if size != REFUSED:
            check_sizes(cuts_Kt[_CUTS], self.options)
        return cuts_Kt[:_CUTS, :tokens]

    def _whole_rows(self, z_tV: Tensor, labels_t: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's share of the chunk's tokens, with the whole vocabulary, and their labels."""
        ranks, rank = self.options.ranks, group_rank(self.options.group)
        if ranks == 1:
            return z_tV, labels_t
        share = -(-labels_t.shape[0] // ranks)
        padding = ranks * share - labels_t.shape[0]
        z_tV = F.pad(z_tV, (0, self.width - z_tV.shape[1]), value=-torch.inf)
        z_tV = F.pad(z_tV, (0, 0, 0, padding))
        z_uV = collectives.all_to_all(z_tV, self.options.group).view(ranks, share, -1).transpose(0, 1).flatten(1)
        return z_uV, F.pad(labels_t, (0, padding))[rank * share : (rank + 1) * share]

    def _cut(self, z_uV: Tensor, labels_u: Tensor, cuts_Ku: Tensor) -> None:
        order = ordered(z_uV)
        falling = z_uV.gather(1, order)
        scaled = falling.to(cuts_Ku.dtype) / self.options.temperature
        peak_u1 = scaled[:, :1].clamp(min=torch.finfo(scaled.dtype).min)
        exp = (scaled - peak_u1).exp_()
        mass = exp.cumsum(1)
        before = F.pad(mass[:, :-1], (1, 0))
        inside = (before < self.top_p * mass[:, -1:]) & (exp > 0)
        last_u1 = inside.sum(1, keepdim=True).clamp(min=1) - 1
        cut_u1, id_u1 = falling.gather(1, last_u1), order.gather(1, last_u1)
        log_sum_u1 = mass.gather(1, last_u1).log()
        label_u1 = labels_u.clamp(min=0).unsqueeze(1)
        z_u1 = z_uV.gather(1, label_u1)
        log_prob_u1 = z_u1.to(scaled.dtype) / self.options.temperature - peak_u1 - log_sum_u1
        there = _not_after(z_u1, label_u1, cut_u1, id_u1) & (z_u1 > -torch.inf)
        cuts_Ku[_CUT], cuts_Ku[_PEAK], cuts_Ku[_LOG_SUM] = cut_u1[:, 0], peak_u1[:, 0], log_sum_u1[:, 0]
        _integers(cuts_Ku[_LAST]).copy_(id_u1[:, 0])
        cuts_Ku[_LOG_PROB] = log_prob_u1.where(there, -torch.inf)[:, 0]


def top_p_fault(options: HeadOptions) -> ValueError | None:
    """Whether this rank's shard stands where equal shards would."""
    vocab, rank, width = options.vocab, group_rank(options.group), _width(options)
    whole = vocab.columns == width or vocab.stop >= vocab.size
    if vocab.start == rank * width and whole and vocab.columns <= width:
        return None
    return ValueError(
        f"vocab is {vocab} on rank {rank} of tp_group: top_p without top_k needs shards of equal width, the last one "
        f"maybe narrower; pad the vocabulary to a multiple of the ranks, or add a top_k"
    )


def check_sizes(sizes_T: Tensor, options: HeadOptions) -> None:
    """Raises on every rank where one refused its arguments, or takes the vocabulary to be larger or smaller."""
    if options.ranks == 1 or not has_values(sizes_T):
        return
    raise_if((sizes_T == REFUSED).any(), REFUSAL)
    raise_if(
        (sizes_T != options.vocab.size).any(),
        "vocab: the ranks of tp_group must agree on the vocabulary's size; pass the same vocab.size on each",
    )


def _width(options: HeadOptions) -> int:
    rank = group_rank(options.group)
    return -(-options.vocab.start // rank) if rank else options.vocab.columns


def _not_after(z: Tensor, ids: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    """bool: what stands before or at (cut, last) in the order of the vocabulary. `cut` holds a value of z's dtype."""
    cut = cut.to(z.dtype)
    return (z > cut) | ((z == cut) & (ids <= last))


def _integers(x: Tensor) -> Tensor:
    """The same memory as integers."""
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def _inside(probs: Tensor, top_p: float) -> Tensor:
    """bool: whether the probabilities before, in falling order, do not reach p yet."""
    return F.pad(probs.cumsum(-1)[..., :-1], (1, 0)) < top_p
