"""Logits or log-probabilities of a few token ids per token: given ids, or those of the k largest logits.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K ids per token, N candidates, R ranks. A
candidate is one of a rank's own k largest logits: the k largest of all are among them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, VocabShard
from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.head.call.logit_gradient import Basis
from megatron_ext.head.call.matmul import transformed
from megatron_ext.head.call.statistics import Statistics
from megatron_ext.head.checks import check_integers, forgotten_group, is_int
from megatron_ext.head.readouts.read_out import Flatten, ReadOut, ReadOutResults
from megatron_ext.head.row_passes.passes import passes_of
from megatron_ext.head.row_passes.selection import largest
from megatron_ext.numerics.tensors import fault_within

_GROUP = 64  # columns


class _Picks(ReadOut):
    """Base of read-outs `[T, K]` of a few ids: logits before the temperature; if `normalised`, log-probabilities.

    dz = scatter_add(g) - softmax * sum g, without the second term for logits.
    """

    needs_logits = True
    by_leaf = True

    def __init__(self, normalised: bool):
        self.normalised = self.softmax = normalised  # type: ignore[misc]

    def picked(self, z_TK: Tensor, stats: Any) -> Tensor:
        """Return the results `[T, K]`, given the ids' logits."""
        if not self.normalised:
            return z_TK
        values_TK = transformed(z_TK, None, None, self.call.temperature, z_TK.dtype)
        largest_T = stats.largest.where(stats.largest > -torch.inf, 0.0)
        return ((values_TK - largest_T.unsqueeze(1)) - stats.log_sum.unsqueeze(1)).to(values_TK.dtype)

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis | None:
        return Basis(lse=-self.row_sums(grad.double())) if self.normalised else None

    def at_columns(self, saved: list[Tensor], rows: slice, grad: Tensor) -> tuple[Tensor, Tensor]:
        g_tK = grad[rows].double()
        return saved[0][rows], g_tK if self.normalised else g_tK * self.call.temperature


class Gather(_Picks):
    """Log-probabilities `[..., K]` of the token ids `ids` `[..., K]`, fp32 (fp64 for fp64); an id may come twice.

    Args:
        ids: integers, global token ids, of all ranks' tokens.
        normalised: False: the ids' logits instead, before the temperature. If no other read-out reads more, products
            then run over the columns of all tokens' ids, if these are at most half of the shard's columns; the host
            reads these columns from the device once.
    """

    def __init__(self, ids: Tensor, normalised: bool = True):
        super().__init__(normalised)
        self.ids = ids
        self.rows = ids.shape[-1] if isinstance(ids, Tensor) and ids.dim() else 0

    def per_token(self) -> tuple[str, Tensor]:
        return "indices[..., 0]", self.ids[..., 0]

    def check(self, size: int, vocab: VocabShard | None, group: Group) -> ValueError | None:
        check_integers("indices", self.ids)
        if self.ids.dim() == 0 or self.ids.shape[-1] == 0:
            raise ValueError(f"indices has shape {tuple(self.ids.shape)}: it must be [..., K] with K at least 1")
        fix = "; clamp those of tokens that do not count and mask their results"
        fault = fault_within("indices", self.ids, size, fix)
        return fault and ValueError(f"{fault}{forgotten_group(group, vocab)}")

    def flatten(self, flat: Flatten) -> None:
        self.labels_T = self.ids_TK = flat(self.ids).long()

    def columns(self) -> Tensor | None:
        return None if self.normalised else self.ids_TK[self.call.vocab.owns(self.ids_TK)] - self.call.vocab.start

    def scan(self, rows: slice, logits: Sequence[Tensor], stats_Kt: Tensor, own_Kt: Any) -> None:
        z_tV, vocab, ids_tK = logits[0], self.call.vocab, self.ids_TK[rows]
        if not vocab.counted:
            stats_Kt.fill_(-torch.inf)
            return
        own_tK = vocab.owns(ids_tK)
        found_tK = z_tV.gather(1, self.call.place(ids_tK - vocab.start).where(own_tK, 0)).to(stats_Kt.dtype)
        stats_Kt.copy_(found_tK.where(own_tK, -torch.inf).t())

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        return [self.picked(stats_RKT.amax(0).t(), stats)], [self.ids_TK]


class TopK(_Picks):
    """The k likeliest ids of each token: log-probabilities `[..., k]`, fp32 (fp64 for fp64), falling, and int64 ids
    `[..., k]`. Among equals the lowest id comes first. Every rank sends its own k largest logits with their ids.

    Args:
        k: number of ids, from 1 to the vocabulary's size.
        normalised: False: the ids' logits instead, before the temperature.
    """

    count = 2

    def __init__(self, k: int, normalised: bool = True):
        super().__init__(normalised)
        self.k = k
        self.rows = 2 * k if isinstance(k, int) else 0

    def check(self, size: int, vocab: VocabShard | None, group: Group) -> ValueError | None:
        """Return the fault of a `k` that maybe only this rank sees, and raise a fault that every rank sees.

        Without a `vocab` the vocabulary's `size` is a guess, and with unequal shards another rank may guess more.
        """
        if is_int(self.k, 1) and self.k <= size:
            return None
        alone = vocab is None and is_int(self.k, 1)
        hint = forgotten_group(group, vocab) if is_int(self.k, 1) else ""
        fault = ValueError(f"k is {self.k!r}: it must be an int from 1 to the vocabulary's size {size}{hint}")
        if not alone:
            raise fault
        return fault

    def scan(self, rows: slice, logits: Sequence[Tensor], stats_Kt: Tensor, own_Kt: Any) -> None:
        z_tV, vocab = logits[0], self.call.vocab
        z_Kt, ids_Kt, counted = stats_Kt[: self.k], integers(stats_Kt)[self.k :], vocab.counted
        own = min(self.k, counted)
        z_Kt[own:] = -torch.inf  # a shard of fewer than k columns also sends -inf with ids past the vocabulary
        ids_Kt[own:] = torch.arange(own, self.k, device=ids_Kt.device).unsqueeze(1) + vocab.size
        for at in blocks(z_tV, 4) if own else []:
            block = z_tV[at, :counted]
            order_tK = largest_columns(block, own)
            z_Kt[:own, at] = block.gather(1, order_tK).t().to(z_Kt.dtype)
            ids_Kt[:own, at] = (order_tK + vocab.start).t().to(ids_Kt.dtype)

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        z_RKT, ids_RKT = stats_RKT[:, : self.k], integers(stats_RKT)[:, self.k :]
        z_TK = own_KT.new_empty(z_RKT.shape[2], self.k)
        ids_TK = torch.empty_like(z_TK, dtype=torch.int64)
        for at in blocks(z_RKT.flatten(0, 1).t()):
            z_tN, ids_tN = z_RKT[..., at].flatten(0, 1).t(), ids_RKT[..., at].flatten(0, 1).t()
            order_tK = largest(z_tN, ids_tN, self.k)
            z_TK[at], ids_TK[at] = z_tN.gather(1, order_tK), ids_tN.gather(1, order_tK).long()
        return [self.picked(z_TK, stats), ids_TK], [ids_TK]


def integers(stats: Tensor) -> Tensor:
    """View `stats` as integers of the same width: token ids are sent beside values, exact at any vocabulary size."""
    return stats.view(torch.int64 if stats.dtype == torch.float64 else torch.int32)


def largest_columns(z_TV: Tensor, k: int, any_equals: bool = False) -> Tensor:
    """Return the columns of each row's k largest logits, falling, of equals the lowest column first: `[T, k]`, int64.

    The columns are divided into groups of neighbours. Only the k groups with the largest maxima can hold one of the k
    largest logits, so only their columns are compared one by one, and the logits are read once.

    Args:
        any_equals: any of equal logits may be among the k, in any order, which is faster.
    """
    groups, passes = z_TV.shape[1] // _GROUP, passes_of(z_TV)
    found_TK = None
    if groups >= 2 * k:
        found_TK = largest_columns(passes.group_maxima(z_TV, groups, _GROUP), k, any_equals)
    return passes.first_columns(z_TV, found_TK, _GROUP, k, any_equals)
