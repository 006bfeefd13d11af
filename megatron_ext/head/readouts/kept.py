"""Log-probability and entropy among the token ids that a generator kept at each position: replay of its sampling mask.

A sampler that filters (top-k, top-p, min-p) draws from the ids that it kept, and inference engines can return these ids
as compressed rows: `ids` has those of all positions, one after the other, and `offsets` where each position begins.
Over the same ids training computes the same distribution, also where its own logits would have kept others
(DeepSeek-V3.2, arXiv 2512.02556, section 3.1). With z a kept id's logit, l the lse of these, p = exp(z - l), entropy H:

    log-probability   z_y - l                              dz = [v == y] - p
    entropy           l - sum p z                          dz = -p (log p + H)

A rank reads the kept ids of its own columns alone, and sends three numbers a token.

Legend: T tokens, t of a chunk, N kept ids of all tokens together, n of a chunk, V columns of this rank's vocabulary
shard, K rows of statistics, R ranks.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed.groups import Group, VocabShard
from megatron_ext.head.call import statistics
from megatron_ext.head.call.matmul import transformed
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import MAX, SUM_EXP
from megatron_ext.head.checks import INTEGERS
from megatron_ext.head.readouts.read_out import Flatten, OfLabels, ReadOutResults, counted
from megatron_ext.head.readouts.teacher import normaliser
from megatron_ext.head.row_passes.passes import PYTORCH, passes_of
from megatron_ext.numerics.tensors import check_plain, check_within, has_values, raise_if

_OWN = 2  # the row of `own`, behind the largest logit and the sum of exponentials relative to it


class Kept(OfLabels):
    """Log-probability of each label among the ids that were kept at its token: `[...]`, fp32 (fp64 for fp64).

    Args:
        labels: `[...]`, integers: global token ids. A label must be among its token's kept ids, or `ignore_index`.
        offsets: integers `[T + 1]`, T tokens of all ranks in the order of `labels`: the kept ids of token i are
            `ids[offsets[i]:offsets[i + 1]]`. A token that was not sampled may have none.
        ids: integers `[N]`, global token ids, none twice at one token.
        ignore_index: tokens with this label get 0 and no gradient.

    If no other read-out reads more, products run over the columns that any token kept, if these are at most half of the
    shard's: `6 T U D` FLOPs for U columns, and a copy of their rows of the weight in each pass. The host reads these
    columns from the device once. Communicates nothing beside the common exchange.

    Raises:
        ValueError: `offsets` and `ids` are no such rows, or a label is not among its kept ids. Every rank raises, also
            if one rank alone was given the fault.
    """

    softmax = False
    needs_logits = True
    by_leaf = True
    reads_labels = False
    rows = 3
    keeps_own = True

    def __init__(self, labels: Tensor, offsets: Tensor, ids: Tensor, ignore_index: int = -100):
        super().__init__(labels, ignore_index)
        self.offsets, self.ids = offsets, ids

    def check(self, size: int, vocab: VocabShard | None, group: Group) -> ValueError | None:
        fault = super().check(size, vocab, group)
        check_kept_shapes(self.labels, self.offsets, self.ids)
        try:
            check_kept_rows(self.labels, self.offsets, self.ids, size, self.ignore_index)
        except ValueError as found:
            return ValueError(str(found))
        return fault

    def flatten(self, flat: Flatten) -> None:
        super().flatten(flat)
        device = self.labels_T.device
        self.ids_N = self.ids.to(device).long()
        # Clamped, since a rank with offsets past the end comes here before it raises.
        self.offsets_T = self.offsets.to(device).long().clamp(0, self.ids_N.shape[0])
        self.place_T = flat(torch.arange(self.labels.numel(), device=device).view(self.labels.shape))
        self._entries: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._logits: list[Tensor] = []
        if self.call.ranks > 1:
            self.numbers_T = self._sums(statistics.scrambled(self.ids_N + 1))

    def _sums(self, x_N: Tensor) -> Tensor:
        """Return the sum of the integers `x` of each token's kept ids: `[T]`."""
        return F.pad(x_N.cumsum(0), (1, 0))[self.offsets_T].diff()[self.place_T]

    def entries(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return this rank's kept ids, token by token: each id's token, its column of the shard, and whether it is the
        label; and on the CPU the offsets of tokens, `[T + 1]`. The host waits for the device, once a call."""
        if not self._entries:
            own_N = self.call.vocab.owns(self.ids_N)
            first_T = F.pad(own_N.cumsum(0), (1, 0))[self.offsets_T[:-1]][self.place_T]
            lengths_T = self._sums(own_N.long())
            starts_T = F.pad(lengths_T.cumsum(0), (1, 0))
            starts = starts_T.cpu()
            token_N = torch.repeat_interleave(lengths_T, output_size=int(starts[-1]))
            within_N = torch.arange(token_N.shape[0], device=token_N.device) - starts_T[token_N]
            column_N = self.ids_N[own_N][first_T[token_N] + within_N] - self.call.vocab.start
            is_label_N = column_N + self.call.vocab.start == self.labels_T[token_N]
            self._entries.append((token_N, column_N, is_label_N, starts))
        return self._entries[0]

    def columns(self) -> Tensor:
        return self.entries()[1]

    def _part(self, rows: slice) -> tuple[slice, Tensor, Tensor, Tensor]:
        """Return a chunk's slice of `entries`, and of each entry the token, counted from the chunk's first, the column,
        and whether it is the label."""
        token_N, column_N, is_label_N, starts = self.entries()
        at = slice(int(starts[rows.start]), int(starts[rows.stop]))
        return at, token_N[at] - rows.start, column_N[at], is_label_N[at]

    def of_leaf(self, call: ResolvedHead) -> Self:
        part = super().of_leaf(call)
        part._entries, part._logits = [], []
        return part

    def scan(self, rows: slice, logits: Sequence[Tensor], stats_Kt: Tensor, own_Kt: Any) -> None:
        _, token_n, column_n, is_label_n = self._part(rows)
        lengths_t = self.entries()[3][rows.start : rows.stop + 1].diff().to(token_n.device)
        z_n = logits[0][token_n, self.call.place(column_n)]
        z_n = transformed(z_n, None, None, self.call.temperature, stats_Kt.dtype)
        self._logits.append(z_n)
        stats_Kt[MAX] = peak_t = _largest(z_n, lengths_t)
        below_n = (z_n - peak_t.where(peak_t > -torch.inf, 0.0)[token_n]).double()
        stats_Kt[SUM_EXP] = self._added(below_n.exp(), lengths_t)
        stats_Kt[_OWN] = self.own(z_n, below_n, is_label_n, lengths_t)

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        largest_T, log_sum_T = normaliser(stats_RKT, 0, self.call)  # log 1 for tokens without ids, which do not count
        value_T = counted(self.value(largest_T, log_sum_T, stats_RKT.double()), self.counts_T)
        z_N = torch.cat(self._logits) if self._logits else own_KT.new_empty(0)
        return [value_T.to(own_KT.dtype)], [value_T, largest_T, log_sum_T, z_N]

    def at_places(self, saved: list[Tensor], rows: slice, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        at, token_n, column_n, is_label_n = self._part(rows)
        value_t, largest_t, log_sum_t = (x[rows] for x in saved[:3])
        log_p_n = (saved[3][at].double() - largest_t[token_n]) - log_sum_t[token_n]
        counts_t = self.counts_T[rows] & (value_t > -torch.inf)
        g_n = grad[rows].double().where(counts_t, 0.0)[token_n]
        pulled_n = self.pulled(log_p_n, value_t[token_n], is_label_n)
        return token_n, column_n, (g_n * pulled_n).where(g_n != 0, 0.0)

    def _added(self, x_n: Tensor, lengths_t: Tensor) -> Tensor:
        """Return the sum of each token's numbers, by the `bits` of the call."""
        return (passes_of(x_n) if self.call.fixed else PYTORCH).segment_sums(x_n, lengths_t)

    def own(self, z_n: Tensor, below_n: Tensor, is_label_n: Tensor, lengths_t: Tensor) -> Tensor:
        """Return the third number of each token that is sent: here the label's logit, -inf without one."""
        return _largest(z_n.where(is_label_n, -torch.inf), lengths_t)

    def value(self, largest_T: Tensor, log_sum_T: Tensor, stats_RKT: Tensor) -> Tensor:
        """Return the result in fp64, given the largest kept logit of all shards, the log of the sum of exponentials
        relative to it, and every shard's numbers."""
        return (stats_RKT[:, _OWN].amax(0) - largest_T) - log_sum_T

    def pulled(self, log_p_n: Tensor, value_n: Tensor, is_label_n: Tensor) -> Tensor:
        """Return the derivative of the result by each kept logit, given its log-probability and its token's result."""
        return log_p_n.expm1().where(is_label_n, log_p_n.exp()).neg()


class KeptEntropy(Kept):
    """Entropy `-sum p log p` of the distribution over the ids that were kept: `[...]`, fp32 (fp64 for fp64).

    Arguments, costs and errors are those of `Kept`.
    """

    def own(self, z_n: Tensor, below_n: Tensor, is_label_n: Tensor, lengths_t: Tensor) -> Tensor:
        weighed_n = (below_n.exp() * below_n).where(below_n > -torch.inf, 0.0)
        return self._added(weighed_n, lengths_t)

    def value(self, largest_T: Tensor, log_sum_T: Tensor, stats_RKT: Tensor) -> Tensor:
        peaks_RT, sums_RT, own_RT = stats_RKT.unbind(1)
        below_RT = (peaks_RT - largest_T).where(peaks_RT > -torch.inf, 0.0)
        return log_sum_T - self.added((below_RT - log_sum_T).exp() * (own_RT + sums_RT * below_RT))

    def pulled(self, log_p_n: Tensor, value_n: Tensor, is_label_n: Tensor) -> Tensor:
        finite_n = log_p_n.clamp(min=-1e4)  # p is 0 further away
        return -log_p_n.exp() * (finite_n + value_n)


def _largest(x_n: Tensor, lengths_t: Tensor) -> Tensor:
    """Return the largest number of each token, -inf where a token has none."""
    return torch.segment_reduce(x_n, "max", lengths=lengths_t, initial=-torch.inf, unsafe=True)  # unsafe: no wait


def check_kept_shapes(labels: Tensor, offsets: Any, ids: Any) -> None:
    """Raise ValueError unless `offsets` and `ids` are integers of one dim, an offset for each label and one more."""
    for name, x in (("offsets", offsets), ("ids", ids)):
        check_plain(name, x)
        if not isinstance(x, Tensor) or x.dtype not in INTEGERS or x.dim() != 1:
            found = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} is {found}: it must be a tensor of integers of one dim; make it by torch.tensor")
    if offsets.shape[0] != labels.numel() + 1:
        raise ValueError(
            f"offsets has {offsets.shape[0]} entries for {labels.numel()} labels: it must have one for each label and "
            f"one more; repeat an offset where a token was not sampled"
        )


def check_kept_rows(labels: Tensor, offsets: Tensor, ids: Tensor, size: int, ignore_index: int) -> None:
    """Raise ValueError unless `ids` are in the vocabulary, none twice at a token, and each label is among its ids."""
    if not has_values(labels) or not has_values(offsets) or not has_values(ids):
        return
    offsets, ids, count = offsets.to(labels.device).long(), ids.to(labels.device).long(), ids.shape[0]
    lengths = offsets.diff()
    raise_if(
        (offsets[0] != 0) | (offsets[-1] != count) | (lengths < 0).any(),
        f"offsets do not cut {count} ids into rows: they must begin with 0, never fall and end with {count}; pass the "
        f"cumulative numbers of kept ids",
    )
    check_within("ids", ids, size)
    token = torch.searchsorted(offsets[1:], torch.arange(count, device=ids.device), right=True)
    place = (token * size + ids).sort().values
    raise_if((place.diff() == 0).any(), "ids holds one twice at one token: each must be there once")
    flat = labels.reshape(-1).long()
    kept = torch.zeros(flat.shape[0] + 1, dtype=torch.bool, device=ids.device)
    token = token.clamp(max=flat.shape[0] - 1) if flat.shape[0] else token
    kept[token.where(flat[token] == ids, flat.shape[0]) if flat.shape[0] else token] = True
    raise_if(
        (~kept[:-1] & (flat != ignore_index)).any(),
        f"labels holds one that is not among the kept ids of its token: it cannot have been sampled there; mark tokens "
        f"that were not sampled with ignore_index ({ignore_index}), and pass the mask of the same tokens, not shifted "
        f"against the labels",
    )
