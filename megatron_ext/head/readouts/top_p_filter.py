"""Top-p (nucleus) filtering of a vocabulary-parallel distribution, and the log-probability of a label under it.

Of a token's logits in descending order top-p keeps the shortest prefix whose probability reaches p, and all logits
equal to the last one (`row_passes/nucleus.py`). The prefix may be the whole vocabulary, so a rank needs all logits of a
token to find it: an all-to-all gives each rank all columns of some tokens of a chunk. The rank finds the cuts of these
tokens, and sends the smallest kept logit and the sum of the kept exponentials to the others. If one chunk holds all
tokens, every rank gathers all logits instead. Both sides must know the sizes of an all-to-all, so the ranks first
exchange the sizes of their shards.

Legend: T tokens, t of a chunk, u of a chunk on this rank, V columns of this rank's vocabulary shard, R ranks, L whole
vocabulary with the padding behind it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank
from megatron_ext.head.call import chunk_sizes
from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.head.call.matmul import transformed
from megatron_ext.head.call.statistics import check_apart, fingerprint
from megatron_ext.head.readouts.read_out import OfLabels, ReadOutResults, counted
from megatron_ext.head.row_passes.passes import passes_of
from megatron_ext.numerics.tensors import has_values, raise_unless

# Up to this number of logits of the whole vocabulary, every rank cuts all tokens itself instead of sharing the work:
# sorting so many takes a few milliseconds on a CPU core.
_TOO_FEW_TO_SHARE = 1 << 17

# Numbers of a token after its cut: the smallest kept logit, the maximum over the temperature, the sum of the kept
# exponentials relative to it (a logarithm would lose digits), the label's log-probability, and its rounding error.
_CUT, _PEAK, _SUM, _LOG_PROB, _ROUNDED = range(5)


class TopPFiltered(OfLabels):
    """Log-probability of each label among the ids of the whole vocabulary that `top_p` keeps: `[...]`, fp32 (fp64 for
    fp64); -inf for a label that is not kept, 0 for `ignore_index`.

    Communicates, at several ranks: 1 all-gather of the shards, then 1 all-to-all for each chunk and 1 all-gather of the
    cuts; of a single chunk 1 all-gather of its logits instead of both. Never more than 2 a chunk.
    """

    softmax = False
    needs_logits = True
    by_leaf = False
    reads_labels = False
    rows = 5
    in_step = True
    begins = True

    def __init__(self, labels: Tensor, top_p: float, ignore_index: int):
        super().__init__(labels, ignore_index)
        self.top_p = top_p

    @property
    def width(self) -> int:
        """Return the number of columns of rank 0's shard, to which every rank pads what it sends."""
        vocab, rank = self.call.vocab, group_rank(self.call.group)
        return -(-vocab.start // rank) if rank else vocab.columns

    def chunks(self, tokens: int, on_gpu: bool) -> list[slice] | None:
        """Cut the tokens by the common `width`; into a single chunk only if there are few, or with `chunk_tokens` at
        most a rank's part of a chunk: with several chunks the ranks share the work.
        """
        ranks, limit = self.call.ranks, self.call.chunk_tokens
        if ranks == 1:
            return None
        # On a GPU a quarter of other read-outs' chunks: the chunk, what is sent, what comes, and rows are held at once.
        found = chunk_sizes.chunks(slice(0, tokens), limit, self.width * (4 if on_gpu else 1), on_gpu)
        most = max(limit // ranks, 1) if limit else _TOO_FEW_TO_SHARE // max(ranks * self.width, 1)
        if len(found) == 1 and tokens > max(most, 1):
            found = [slice(0, tokens // 2), slice(tokens // 2, tokens)]
        return found

    @property
    def exchanges(self) -> bool:  # type: ignore[override]
        return not self._at_once

    def agreed(self) -> list[int]:
        """Return the first column, the number of columns, and the width that this rank takes each shard to have."""
        return [self.call.vocab.start, self.call.vocab.columns, self.width]

    def check_agreed(self, found_RN: Tensor) -> None:
        """Raise unless the shards are equal pieces of one vocabulary, whose last columns may be missing or padding."""
        size_R, start_R, columns_R, width_R = found_RN[:, :4].unbind(1)
        width, size = columns_R[0], size_R[0]
        place_R = torch.arange(start_R.shape[0], device=start_R.device) * width
        placed_R = (start_R == place_R) | ((columns_R == 0) & (start_R >= size))
        full_R = (columns_R == width) | ((columns_R < width) & (start_R + columns_R >= size))
        raise_unless(
            (placed_R & full_R & (width_R == width)).all() & (width * start_R.shape[0] >= size),
            "vocab: top_p without top_k needs shards of equal width in rank order, of which the last may be narrower, "
            "that cover the vocabulary; pad it to a multiple of the ranks, or add a top_k",
        )

    def scan(self, rows: slice, logits: Sequence[Tensor], stats_Kt: Tensor, own_Kt: Any) -> None:
        z_tV, labels_t = logits[0], self.labels_T[rows]
        stats_Kt.zero_()
        mine, z_uL = (slice(None), self._all_rows(z_tV)) if self._at_once else self._share_of_rows(z_tV)
        self._cut(z_uL[:, : self.call.vocab.size], labels_t[mine], stats_Kt[:, mine])

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        cuts_KT = own_KT
        if not self._at_once:
            owner_T = self._owner(cuts_KT.device)
            cuts_KT = stats_RKT.gather(0, owner_T.expand(1, *stats_RKT.shape[1:])).squeeze(0)
        return [counted(cuts_KT[_LOG_PROB], self.counts_T)], [cuts_KT.t().contiguous()]

    def pull(
        self, saved: list[Tensor], rows: slice, logits: Sequence[Tensor], grad: Tensor, out_tV: Tensor, first: bool
    ) -> None:
        labels_t, cuts_tK = self.labels_T[rows], saved[0][rows]
        vocab, temperature = self.call.vocab, self.call.temperature
        cut_t, peak_t, sum_t, log_prob_t, rounded_t = cuts_tK.unbind(1)
        counts_t = (log_prob_t > -torch.inf) & self.counts_T[rows]
        g_t = (grad[rows].double() / temperature).where(counts_t, 0.0)
        log_prob_t = (log_prob_t.double() + rounded_t).where(counts_t, 0.0)
        at_label_t = (-g_t * log_prob_t.expm1()).to(cuts_tK.dtype)
        target_t = (labels_t - vocab.start).where(vocab.owns(labels_t) & counts_t, -1)
        scale_t = (-g_t / sum_t).to(cuts_tK.dtype)
        z_tV, out_tV = logits[0][:, : vocab.counted], out_tV[:, : vocab.counted]
        for at in blocks(z_tV):
            kept = z_tV[at].masked_fill(z_tV[at] < cut_t[at].unsqueeze(1).to(z_tV.dtype), -torch.inf)
            part = out_tV[at] if first else torch.empty_like(out_tV[at])
            passes_of(kept).row_gradient(
                kept,
                target_t[at],
                peak_t[at],
                part,
                scale_T=scale_t[at],
                value_T=at_label_t[at],
                counted=vocab.counted,
                temperature=temperature,
            )
            if not first:
                out_tV[at] += part

    @property
    def _at_once(self) -> bool:
        """Return whether every rank cuts all tokens."""
        return self.call.ranks == 1 or len(self.parts) < 2

    def _all_rows(self, z_tV: Tensor) -> Tensor:
        """Return the logits of the chunk's tokens over the whole vocabulary."""
        if self.call.ranks == 1:
            return z_tV
        z_tL = collectives.all_gather(self._padded(z_tV), self.call.group, dim=1)
        shards = z_tL.split(self.width, 1)
        if has_values(z_tL):
            check_apart(torch.stack([fingerprint(z, self.width) for z in shards]), self.labels_T, self.call)
        return z_tL

    def _share_of_rows(self, z_tV: Tensor) -> tuple[slice, Tensor]:
        """Return this rank's share of the chunk's tokens, and their logits over the whole vocabulary."""
        ranks, tokens = self.call.ranks, z_tV.shape[0]
        z_RuV = self._padded(z_tV, -tokens % ranks)
        z_RuV = collectives.all_to_all(z_RuV, self.call.group).unflatten(0, (ranks, -1))
        share, rank = z_RuV.shape[1], group_rank(self.call.group)
        mine = slice(min(rank * share, tokens), min((rank + 1) * share, tokens))
        return mine, z_RuV.transpose(0, 1)[: mine.stop - mine.start].flatten(1)

    def _padded(self, z_tV: Tensor, rows: int = 0) -> Tensor:
        """Pad logits to the common `width`, and by `rows` rows. Top-p does not see columns past the vocabulary."""
        columns = self.width - z_tV.shape[1]
        return F.pad(z_tV, (0, columns, 0, rows)) if columns or rows else z_tV

    def _owner(self, device: torch.device) -> Tensor:
        """Return the rank that cut each token: `[T]`."""
        lengths = [rows.stop - rows.start for rows in self.parts]
        return torch.cat([torch.arange(n, device=device) // -(-n // self.call.ranks) for n in lengths])

    def _cut(self, z_uV: Tensor, labels_u: Tensor, cuts_Ku: Tensor) -> None:
        cut_u, peak_u, sum_u = passes_of(z_uV).nucleus(z_uV, self.top_p, self.call.temperature, self.multiply)
        z_u = z_uV.gather(1, labels_u.clamp(min=0).unsqueeze(1))[:, 0]
        scaled_u = transformed(z_u, None, None, self.call.temperature, cuts_Ku.dtype)  # rounded as in `pull`
        log_prob_u = scaled_u.double() - peak_u - sum_u.log()
        there_u = (z_u >= cut_u) & (z_u > -torch.inf)
        cuts_Ku[_CUT], cuts_Ku[_PEAK], cuts_Ku[_SUM] = cut_u, peak_u, sum_u
        cuts_Ku[_LOG_PROB] = log_prob_u.where(there_u, -torch.inf)
        cuts_Ku[_ROUNDED] = (log_prob_u - cuts_Ku[_LOG_PROB]).where(there_u, 0.0)
