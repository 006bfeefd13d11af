"""Top-p (nucleus) filtering of a vocabulary-parallel distribution, and the log-probability of a label under it.

Top-p sorts the logits of a token in descending order and keeps the shortest prefix whose probability reaches p, with
all logits that equal its last one. The prefix may be the whole vocabulary, so a rank needs all logits of a token to
find it: an all-to-all gives each rank all columns of some tokens of a chunk. It finds their prefixes, and sends the
smallest logit kept and the lse of the kept ones to the others. If there are so few tokens that one chunk holds them,
every rank gathers all of them instead. The sizes of an all-to-all must be known on both sides, so the ranks first
exchange the sizes of their shards.

Legend: T tokens, t of a chunk, u of a chunk on this rank, V columns of this rank's vocabulary shard, R ranks, L whole
vocabulary with the padding behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank
from megatron_ext.head.engine import agreement, chunk_sizes
from megatron_ext.head.engine.statistics import REFUSED
from megatron_ext.head.readouts.fixed_order_sums import prefix_sums
from megatron_ext.head.readouts.readout import OWN, Logits, ReadOut, fingerprint
from megatron_ext.head.readouts.vocabulary_order import blocks
from megatron_ext.head.row_passes.dispatch import row_gradient
from megatron_ext.head.row_passes.logit_passes import transformed
from megatron_ext.head.validation.argument_checks import REFUSAL, check_agreement, check_apart
from megatron_ext.head.validation.readable_values import has_values, raise_if

# What is known of a token once it is cut: the last logit kept, the scaled maximum, the sum of exponentials from there
# (its logarithm would lose digits), the label's log-probability and what rounding took off it.
_CUT, _PEAK, _SUM, _LOG_PROB, _ROUNDED = range(5)
_CUTS = 5


@dataclass(frozen=True)
class TopP(ReadOut):
    """`[T]`: log-probability of each label among those of the whole vocabulary that `top_p` keeps.

    Communicates, at several ranks: 1 all-gather of the shards, then 1 all-to-all for each chunk and 1 all-gather of the
    cuts; of a single chunk 1 all-gather of its logits instead of both. Never more than 2 a chunk.
    """

    labels_T: Tensor
    top_p: float

    more = _CUTS
    in_step = True

    @property
    def width(self) -> int:
        """The columns of rank 0, which every rank sends, padded."""
        vocab, rank = self.options.vocab, group_rank(self.options.group)
        return -(-vocab.start // rank) if rank else vocab.columns

    def chunks(self, tokens: int, device: torch.device) -> list[slice]:
        """A single one only where the whole rows of all tokens are no larger than a rank's part of a chunk."""
        found, ranks, limit = super().chunks(tokens, device), self.options.ranks, self.options.chunk_tokens
        whole = chunk_sizes.chunks(slice(0, tokens), limit and max(limit // ranks, 1), ranks * self.width)
        if len(found) == 1 < min(len(whole), tokens):
            found = [slice(0, tokens // 2), slice(tokens // 2, tokens)]
        return found

    def begin(self, tokens: int, device: torch.device) -> None:
        if self.options.ranks > 1 and tokens:
            shards_R6 = self._shards(device, self.options.vocab.size)
            check_equal_shards(shards_R6[:, :4])
            if has_values(shards_R6):
                check_agreement(shards_R6[:, 4], shards_R6[:, 5], self.options, **self._shared(device))

    def refuse(self, like: Tensor, tokens: int) -> None:
        self._shards(like.device, int(REFUSED))

    def _shards(self, device: torch.device, size: int) -> Tensor:
        """First column, number of columns, size of the vocabulary and width, as each rank has them, and what options
        and labels it has: `[R, 6]`."""
        own = torch.zeros(1, 6, dtype=torch.int64, device=device)
        own[:, 0], own[:, 1], own[:, 2] = self.options.vocab.start, self.options.vocab.columns, size
        own[:, 3] = self.width
        if has_values(own):
            own[:, 4] = agreement.of_options(self.options, **self._shared(device))
            own[:, 5] = agreement.of_labels(self.labels_T)
        return collectives.all_gather(own, self.options.group)

    def _shared(self, device: torch.device) -> dict[str, Any]:
        """What all ranks must pass alike, beside options: each chunk is exchanged."""
        return agreement.scalars(self) | {"chunks": len(self.chunks(self.labels_T.shape[0], device))}

    def labels(self, tokens: Tensor) -> Tensor:
        return self.labels_T

    def scan(self, logits: Logits, rows: slice, stats_Kt: Tensor) -> None:
        (z_tV,), labels_t = logits, self.labels_T[rows]
        stats_Kt.zero_()
        if self._at_once:
            mine, z_uL = slice(None), self._all_rows(z_tV)
        else:
            self.own_statistics(z_tV, stats_Kt[:OWN], False)
            mine, z_uL = self._share_of_rows(z_tV)
        labels_u, cuts_Ku = labels_t[mine], stats_Kt[OWN:, mine]
        for at in blocks(z_uL):
            self._cut(z_uL[at, : self.options.vocab.size], labels_u[at], cuts_Ku[:, at])

    def exchange(self, stats_KT: Tensor, places_T: Tensor | None) -> Tensor:
        return stats_KT.unsqueeze(0) if self._at_once else super().exchange(stats_KT, places_T)

    def combine(self, stats_RKT: Tensor, own_KT: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        cuts_KT = own_KT[OWN:, :-1]
        if stats_RKT.shape[0] > 1:
            cuts_RKT = stats_RKT[:, OWN:, :-1]
            owner_T = self._owner(cuts_KT.shape[1], cuts_KT.device)
            cuts_KT = cuts_RKT.gather(0, owner_T.expand(1, *cuts_RKT.shape[1:])).squeeze(0)
        log_prob_T = cuts_KT[_LOG_PROB].where(self.labels_T != self.options.ignore_index, 0.0)
        return [log_prob_T], [self.labels_T, cuts_KT.t()]

    def pull(self, logits: Callable[[], Logits], rows: slice, saved: list[Tensor], grad: Tensor, out_tV: Tensor):
        labels_t, cuts_tK = (x[rows] for x in saved)
        o, vocab = self.options, self.options.vocab
        cut_t, peak_t, sum_t, log_prob_t, rounded_t = cuts_tK.unbind(1)
        counts_t = (log_prob_t > -torch.inf) & (labels_t != o.ignore_index)
        g_t = (grad[rows].double() / o.temperature).where(counts_t, 0.0)
        log_prob_t = (log_prob_t.double() + rounded_t).where(counts_t, 0.0)
        at_label_t = (-g_t * log_prob_t.expm1()).to(cuts_tK.dtype)
        target_t = (labels_t - vocab.start).where(vocab.owns(labels_t) & counts_t, -1)
        scale_t = (-g_t / sum_t).to(cuts_tK.dtype)
        z_tV = logits()[0][:, : vocab.counted]
        for at in blocks(z_tV):
            kept = z_tV[at].masked_fill(z_tV[at] < cut_t[at].unsqueeze(1).to(z_tV.dtype), -torch.inf)
            coefficients = (peak_t[at], scale_t[at], None, None, at_label_t[at])
            row_gradient(kept, False, target_t[at], *coefficients, out_tV[at], None, vocab.counted, None, o.temperature)

    @property
    def _at_once(self) -> bool:
        """Whether every rank cuts all tokens."""
        return self.options.ranks == 1 or len(self.chunks(self.labels_T.shape[0], self.labels_T.device)) < 2

    def _all_rows(self, z_tV: Tensor) -> Tensor:
        """Every token of the chunk, with the whole vocabulary."""
        if self.options.ranks == 1:
            return z_tV
        z_tL = collectives.all_gather(self._padded(z_tV), self.options.group, dim=1)
        shards = z_tL.split(self.width, 1)
        check_apart(torch.stack([fingerprint(z, self.width) for z in shards]), self.labels_T, self.options)
        return z_tL

    def _share_of_rows(self, z_tV: Tensor) -> tuple[slice, Tensor]:
        """Which tokens of the chunk are this rank's share, and their rows with the whole vocabulary."""
        ranks, tokens = self.options.ranks, z_tV.shape[0]
        z_RuV = F.pad(self._padded(z_tV), (0, 0, 0, -tokens % ranks))
        z_RuV = collectives.all_to_all(z_RuV, self.options.group).unflatten(0, (ranks, -1))
        share, rank = z_RuV.shape[1], group_rank(self.options.group)
        mine = slice(min(rank * share, tokens), min((rank + 1) * share, tokens))
        return mine, z_RuV.transpose(0, 1)[: mine.stop - mine.start].flatten(1)

    def _padded(self, z_tV: Tensor) -> Tensor:
        """To the width of every rank's part. What pads lies past the vocabulary, and is never a candidate."""
        return F.pad(z_tV, (0, self.width - z_tV.shape[1]))

    def _owner(self, tokens: int, device: torch.device) -> Tensor:
        """`[T]`: the rank that cut each token."""
        lengths = [rows.stop - rows.start for rows in self.chunks(tokens, device)]
        return torch.cat([torch.arange(n, device=device) // -(-n // self.options.ranks) for n in lengths])

    def _cut(self, z_uV: Tensor, labels_u: Tensor, cuts_Ku: Tensor) -> None:
        falling = z_uV.sort(dim=-1, descending=True).values
        scaled = self._scaled(falling, cuts_Ku.dtype)
        peak_u1 = scaled[:, :1].clamp(min=torch.finfo(scaled.dtype).min)
        exp = (scaled - peak_u1).exp_()
        mass = prefix_sums(exp, torch.float64)  # over a whole vocabulary fp32 would lose digits
        before = F.pad(mass[:, :-1], (1, 0))
        inside = (before < self.top_p * mass[:, -1:]) & (exp > 0)
        cut_u1 = falling.gather(1, inside.sum(1, keepdim=True).clamp(min=1) - 1)
        last_u1 = (falling >= cut_u1).sum(1, keepdim=True).clamp(min=1) - 1  # of all that equal the cut
        sum_u1 = mass.gather(1, last_u1)
        sum_u1 = sum_u1.masked_fill(sum_u1 == 0, 1.0)  # a row of -inf: its label has -inf, no gradient
        z_u1 = z_uV.gather(1, labels_u.clamp(min=0).unsqueeze(1))
        log_prob_u1 = self._scaled(z_u1, scaled.dtype).double() - peak_u1 - sum_u1.log()
        there = (z_u1 >= cut_u1) & (z_u1 > -torch.inf)
        cuts_Ku[_CUT], cuts_Ku[_PEAK], cuts_Ku[_SUM] = cut_u1[:, 0], peak_u1[:, 0], sum_u1[:, 0]
        cuts_Ku[_LOG_PROB] = log_prob_u1.where(there, -torch.inf)[:, 0]
        cuts_Ku[_ROUNDED] = (log_prob_u1[:, 0] - cuts_Ku[_LOG_PROB]).where(there[:, 0], 0.0)

    def _scaled(self, z: Tensor, dtype: torch.dtype) -> Tensor:
        """Over the temperature, rounded as in `pull`."""
        return transformed(z, None, None, self.options.temperature, dtype)


def check_equal_shards(shards_R4: Tensor) -> None:
    """Raises on every rank where one refused its arguments, or where the shards are not equal pieces of one vocabulary.

    Args:
        shards_R4: int64, first column, columns and size of the vocabulary of each rank, and how wide it takes each
            shard to be. The last columns may be missing or padding.
    """
    if not has_values(shards_R4):
        return
    start_R, columns_R, size_R, width_R = shards_R4.unbind(1)
    width, size = columns_R[0], size_R[0]
    place_R = torch.arange(start_R.shape[0], device=start_R.device) * width
    placed_R = (start_R == place_R) | ((columns_R == 0) & (start_R >= size))
    full_R = (columns_R == width) | ((columns_R < width) & (start_R + columns_R >= size))
    raise_if((size_R == int(REFUSED)).any(), REFUSAL)
    raise_if(
        (size_R != size).any(),
        "vocab: the ranks of tp_group must agree on the vocabulary's size; pass the same vocab.size on each",
    )
    raise_if(
        ~((placed_R & full_R & (width_R == width)).all() & (width * start_R.shape[0] >= size)),
        "vocab: top_p without top_k needs shards of equal width in rank order, of which the last may be narrower, that "
        "cover the vocabulary; pad it to a multiple of the ranks, or add a top_k",
    )
