"""Logits or log-probabilities of a few token ids per token: given ids, or those of the k largest logits.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K ids per token, N candidates, R ranks. A
candidate is one of a rank's own k largest logits: the k largest of all are among them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.head.engine import statistics
from megatron_ext.head.readouts.fixed_order_sums import sums_of_equals
from megatron_ext.head.readouts.readout import OWN, Logits, ReadOut
from megatron_ext.head.readouts.vocabulary_order import blocks, largest, largest_columns
from megatron_ext.head.row_passes.dispatch import row_gradient
from megatron_ext.head.row_passes.logit_passes import transformed


@dataclass(frozen=True)
class _Picks(ReadOut):
    """Values `[T, K]` and their ids: logits as they are, or `normalised`: log-probabilities, with the temperature.

    dz = scatter_add(g) - softmax * sum g, without the second term for logits; at the ids in fp64, because there the
    terms cancel where the model is sure of one. With `options.entropy` one more column of the values is the entropy H
    of each distribution, for whose g dz gets - g softmax * (log softmax + H).
    """

    normalised: bool

    @property
    def own(self) -> int:
        """Rows of statistics before those of the picked ids."""
        return OWN

    def picked(self, z_TK: Tensor, ids_TK: Tensor, stats_RKT: Tensor, own_KT: Tensor):
        """Results, and what `pull` wants, of the ids' logits."""
        if not self.normalised:
            return [z_TK, ids_TK], [ids_TK]
        values_TK = transformed(z_TK, None, None, self.options.temperature, z_TK.dtype)
        stats = statistics.combine(stats_RKT[:, : self.own], own_KT[: self.own], self.options)
        reference_T = stats.largest.where(stats.largest > -torch.inf, 0.0)
        log_probs_TK = ((values_TK - reference_T.unsqueeze(1)) - stats.log_sum.unsqueeze(1)).to(values_TK.dtype)
        alpha_T = (stats.shift - stats.largest - stats.log_sum).clamp(max=0).exp()  # see gradient.py
        saved = [ids_TK, stats.shift, alpha_T]
        if self.options.entropy:
            assert stats.expected is not None
            entropy_T = (stats.log_sum - stats.expected).to(log_probs_TK.dtype)
            log_probs_TK = torch.cat([log_probs_TK, entropy_T.unsqueeze(1)], 1)
            saved.append((stats.shift - stats.largest - stats.expected).where(alpha_T > 0, 0.0))
        return [log_probs_TK, ids_TK], saved

    def pull(self, logits: Callable[[], Logits], rows: slice, saved: list[Tensor], grad: Tensor, out_tV: Tensor):
        ids_tK, *rest = (x[rows] for x in saved)
        vocab = self.options.vocab
        if vocab.counted == 0:
            out_tV.zero_()
            return
        g_tK = grad[rows].double() / (self.options.temperature if self.normalised else 1.0)
        g_tK, g_entropy_t = (g_tK[:, :-1], g_tK[:, -1]) if self.options.entropy else (g_tK, None)
        own_tK = vocab.owns(ids_tK)
        at_tK = (ids_tK - vocab.start).where(own_tK, 0)  # column 0 is written too: nothing is added to it
        own_g_tK = g_tK.where(own_tK, 0.0)
        if not self.normalised:
            out_tV.zero_()
            _place(out_tV, at_tK, sums_of_equals(own_g_tK, at_tK))
            return
        z_tV = logits()[0]
        peak_t, alpha_t, *away_t = rest
        scale_t, slope_t = -g_tK.sum(1) * alpha_t, torch.zeros_like(alpha_t)
        if g_entropy_t is not None:
            slope_t = -g_entropy_t * alpha_t
            scale_t = scale_t + slope_t * away_t[0]
        u_tK = transformed(z_tV.gather(1, at_tK), None, None, self.options.temperature, peak_t.dtype).double()
        u_tK = u_tK - peak_t.unsqueeze(1)
        bend_tK = scale_t.unsqueeze(1) + slope_t.unsqueeze(1) * u_tK.clamp(min=-1e4)
        picked_tK = sums_of_equals(own_g_tK, at_tK) + u_tK.exp() * bend_tK
        self.softmax(z_tV, peak_t, scale_t, None if g_entropy_t is None else slope_t, out_tV)
        _place(out_tV, at_tK, picked_tK)

    def softmax(self, z_tV: Tensor, shift_t: Tensor, scale_t: Tensor, slope_t: Tensor | None, out_tV: Tensor) -> None:
        """`exp(u) (scale + slope u)`, u = z / temperature - shift."""
        o = self.options
        slope_t = None if slope_t is None else slope_t.to(shift_t.dtype)
        nowhere = torch.full_like(shift_t, -1, dtype=torch.int64)
        given = (shift_t, scale_t.to(shift_t.dtype), slope_t, None, None, out_tV, None)
        row_gradient(z_tV, False, nowhere, *given, o.vocab.counted, None, o.temperature)


@dataclass(frozen=True)
class Gather(_Picks):
    """Of the ids `[T, K]` given. The only result is the values."""

    ids_TK: Tensor

    @property
    def own(self) -> int:
        return OWN + 1  # the entropy's, wanted or not: so many rows as ranks that want it send

    @property
    def more(self) -> int:
        return 1 + self.ids_TK.shape[1]

    def labels(self, like: Tensor) -> Tensor:
        return self.ids_TK

    def scan(self, logits: Logits, rows: slice, stats_Kt: Tensor) -> None:
        (z_tV,), vocab, ids_tK = logits, self.options.vocab, self.ids_TK[rows]
        stats_Kt[OWN] = 0
        self.own_statistics(z_tV, stats_Kt[: self.own], self.normalised)
        stats_Kt[self.own :] = -torch.inf
        if vocab.counted:
            own_tK = vocab.owns(ids_tK)
            found_tK = z_tV.gather(1, (ids_tK - vocab.start).where(own_tK, 0)).to(stats_Kt.dtype)
            stats_Kt[self.own :] = found_tK.where(own_tK, -torch.inf).t()

    def combine(self, stats_RKT: Tensor, own_KT: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        results, saved = self.picked(stats_RKT[:, self.own :, :-1].amax(0).t(), self.ids_TK, stats_RKT, own_KT)
        return results[:1], saved


@dataclass(frozen=True)
class TopK(_Picks):
    """Of the k largest logits of the whole vocabulary, largest first, among equals the lowest id first; and their ids.

    Every rank sends its own k largest with their ids.
    """

    k: int

    @property
    def more(self) -> int:
        return 2 * self.k

    def scan(self, logits: Logits, rows: slice, stats_Kt: Tensor) -> None:
        (z_tV,), vocab = logits, self.options.vocab
        self.own_statistics(z_tV, stats_Kt[:OWN], self.normalised)
        z_Kt, ids_Kt = stats_Kt[OWN : OWN + self.k], _integers(stats_Kt)[OWN + self.k :]
        own = min(self.k, vocab.counted)
        z_Kt[own:] = -torch.inf  # a shard too small sends what comes after every id that exists
        ids_Kt[own:] = torch.arange(own, self.k, device=ids_Kt.device).unsqueeze(1) + vocab.size
        for at in blocks(z_tV, 4) if own else []:
            block = z_tV[at, : vocab.counted]
            order_tK = largest_columns(block, own)
            z_Kt[:own, at] = block.gather(1, order_tK).t().to(z_Kt.dtype)
            ids_Kt[:own, at] = (order_tK + vocab.start).t().to(ids_Kt.dtype)

    def combine(self, stats_RKT: Tensor, own_KT: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        z_RKT, ids_RKT = stats_RKT[:, OWN : OWN + self.k, :-1], _integers(stats_RKT)[:, OWN + self.k :, :-1]
        z_TK = own_KT.new_empty(z_RKT.shape[2], self.k)
        ids_TK = torch.empty_like(z_TK, dtype=torch.int64)
        for at in blocks(z_RKT.flatten(0, 1).t()):
            z_tN, ids_tN = (x[..., at].flatten(0, 1).t() for x in (z_RKT, ids_RKT))
            order_tK = largest(z_tN, ids_tN, self.k)
            z_TK[at], ids_TK[at] = z_tN.gather(1, order_tK), ids_tN.gather(1, order_tK).long()
        return self.picked(z_TK, ids_TK, stats_RKT, own_KT)


def _place(out_tV: Tensor, columns_tK: Tensor, values_tK: Tensor) -> None:
    """Write them, equal ones where columns are equal. Not by `scatter_`: on CPU it makes 16-bit matrices fp32."""
    row_t1 = torch.arange(out_tV.shape[0], device=out_tV.device).unsqueeze(1)
    out_tV.index_put_((row_t1, columns_tK), values_tK.to(out_tV.dtype))


def _integers(stats: Tensor) -> Tensor:
    """The same memory as integers: ids travel beside values, exact at any vocabulary size."""
    return stats.view(torch.int64 if stats.dtype == torch.float64 else torch.int32)
