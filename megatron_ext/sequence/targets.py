"""Labels of this rank's positions from token ids, and whole sequences from results for these labels.

The result for token t+1 is at position t, so that a sequence of S tokens has S - 1 results. Each layout of a batch is a
class with the two methods `labels()` and `results(x)`, where `x` holds a number for every label.

Legend: B sequences, S tokens of each, W context-parallel ranks, P positions that this rank holds; in packs T tokens of
N documents, U the length of the rows into which they are unpacked.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed.collectives import all_gather
from megatron_ext.distributed.groups import Group, check_group, group_rank, group_size
from megatron_ext.sequence.context_parallel_parts import SequenceParts, told_parts
from megatron_ext.sequence.host_values import on_device
from megatron_ext.sequence.next_token import next_tokens
from megatron_ext.sequence.zigzag import check_cu_seqlens, demand

IGNORE_INDEX = -100


class Targets(Protocol):
    """The targets of a batch, in some layout."""

    def labels(self) -> Tensor:
        """Return the next token of each position of this rank, int64 `[B, P]`; `IGNORE_INDEX` where there is none."""

    def results(self, x_BP: Tensor, fault: ValueError | None = None) -> Tensor:
        """Return `[B, S - 1]` of the whole sequences, on every rank, from `[B, P]` of this rank's positions.

        A `fault` of this rank is raised after the exchange, and on the other ranks an error that speaks of it.
        """


@dataclass(frozen=True)
class PaddedParts:
    """Sequences of `length` positions, padded at the end to `W * positions`, of which each rank has its zigzag part.

    Arguments of the methods have the sequence at dim 1. `slices`: the number of sequence-parallel ranks that share this
    rank's positions.

    `whole` first exchanges as many positions of each rank as `length` needs, which every rank knows, and the number of
    positions that each rank has. A rank with too few positions, or with another number than the rest, is then an error
    on all ranks. If all ranks have more positions than `length` needs, the rest follows in a second exchange.

    Raises:
        ValueError: there is one rank, and it has fewer than `length` positions; this rank is not in `cp_group`.
    """

    length: int
    positions: int
    cp_group: Group = None
    argument: str = "target"
    slices: int = 1

    def __post_init__(self) -> None:
        if group_size(check_group(self.cp_group, "cp_group")) == 1 and self.fault is not None:
            raise self.fault

    @property
    def fault(self) -> ValueError | None:
        """Return why this rank's positions cannot be its part of the sequence; None if they can."""
        ranks = group_size(self.cp_group)
        held = self.positions * ranks
        if self.length <= held and (ranks == 1 or self.positions % 2 == 0):
            return None
        even = "" if ranks == 1 else ", an even number on each"
        return ValueError(
            f"{self.argument} has {self.length} positions, logits or hidden states {held} ({self.positions} on each of "
            f"{ranks} context-parallel ranks): they must be at least as many{even}; pass {self.argument} as the whole "
            f"sequence, unshifted, and the group that shares it as cp_group"
        )

    def split(self, x: Tensor, fill: int) -> Tensor:
        """Return this rank's `[B, P, ...]` of `[B, length, ...]`, with `fill` in the padding. Communicates nothing."""
        ranks = group_size(self.cp_group)
        places = self.positions if self.fault is None else self._needed
        padding = places * ranks - self.length
        return SequenceParts(self.cp_group).split(F.pad(x, [0, 0] * (x.dim() - 2) + [0, padding], value=fill), 1)

    def whole(self, x: Tensor, fault: ValueError | None = None) -> Tensor:
        """Return `[B, length, ...]` from this rank's `[B, P, ...]`.

        Communicates 1 all-gather, backward 1 reduce-scatter; 2 and 2 if sequences are padded more than `length` needs.
        A `fault` of this rank is raised after the first all-gather, and on other ranks an error that speaks of it.
        """
        parts = SequenceParts(self.cp_group)
        return parts.gather_or_refuse(x, 1, self.fault or fault, self._needed)[:, : self.length]

    @property
    def _needed(self) -> int:
        """Return the number of positions that `length` needs on each rank."""
        unit = math.lcm(2, self.slices)
        return -(-self.length // (group_size(self.cp_group) * unit)) * unit


class PaddedTargets:
    """Targets of padded sequences: `tokens_BS` are whole and unshifted, `shape_BP` is `[B, P]` of this rank.

    In backward the gradients that all ranks have of the whole results are summed, as in Megatron and NeMo-RL's
    AllGatherCPTensor. Tokens that do not fit this rank's positions are refused as in `PaddedParts`; `slices`: as in
    `PaddedParts`.
    """

    def __init__(self, tokens_BS: Tensor, shape_BP: torch.Size, cp_group: Group, slices: int = 1):
        _check_tokens(tokens_BS, shape_BP[0])
        self._tokens_BS = tokens_BS
        self._parts = PaddedParts(tokens_BS.shape[1], shape_BP[1], cp_group, slices=slices)

    def labels(self) -> Tensor:
        return self._parts.split(next_tokens(self._tokens_BS), IGNORE_INDEX)

    def results(self, x_BP: Tensor, fault: ValueError | None = None) -> Tensor:
        return self._parts.whole(x_BP, fault)[:, :-1]


class PackedTargets:
    """Targets of documents laid end to end in one sequence, B = 1. Results are `[N, U - 1]`, a row for each document,
    filled up with zeros.

    The host never waits for the device: `cu_seqlens_padded` may be on a GPU.

    Args:
        tokens_1T: `[1, T]`, unshifted; if `shifted` `[1, P]`, the labels of this rank's positions.
        shape_BP: `[1, P]`, the shape of this rank's positions.
        cu_seqlens_padded: integers `[N + 1]`, the documents' cumulative lengths with padding, over all ranks. Each
            length is a multiple of 2W if W > 1.
        unpacked_seqlen: U.
        cu_seqlens: the cumulative lengths without padding; results of padding are 0 then. None: unknown, and all of a
            document's positions up to U count as tokens.

    Raises:
        ValueError: shapes that do not fit; values of `cu_seqlens` or `cu_seqlens_padded` that break a rule, or a
            document longer than U without its padding, if they lie on the CPU. On a GPU these stop the device
            (`torch._assert_async`).
    """

    def __init__(
        self,
        tokens_1T: Tensor,
        shape_BP: torch.Size,
        cp_group: Group,
        cu_seqlens_padded: Tensor,
        unpacked_seqlen: int,
        shifted: bool = False,
        cu_seqlens: Tensor | None = None,
    ):
        ranks = group_size(check_group(cp_group, "cp_group"))
        multiple = 2 * ranks if ranks > 1 else 1
        _check_tokens(tokens_1T, 1)
        total, held = tokens_1T.shape[1] * (ranks if shifted else 1), shape_BP[1] * ranks
        self._fault: ValueError | None = None
        if shape_BP[0] != 1 or total != held:
            self._fault = ValueError(
                f"target has shape {tuple(tokens_1T.shape)}, logits or hidden states hold {tuple(shape_BP)} positions "
                f"on each of {ranks} context-parallel ranks: a pack must be [1, {held}] of unshifted token ids, or "
                f"[1, {shape_BP[1]}] with target_is_pre_rolled=True"
            )
            if ranks == 1 or shape_BP[0] != 1:  # else other ranks may have no fault, and `results` tells them
                raise self._fault
        if isinstance(unpacked_seqlen, bool) or not isinstance(unpacked_seqlen, int) or unpacked_seqlen < 1:
            raise ValueError(
                f"unpacked_seqlen is {unpacked_seqlen!r}: it must be a positive int; pass the longest document's length"
            )
        check_cu_seqlens(cu_seqlens_padded, total, multiple, "cu_seqlens_padded")
        if cu_seqlens is not None:
            _check_lengths(cu_seqlens, cu_seqlens_padded, unpacked_seqlen)
        device = tokens_1T.device
        self._tokens_1T, self._shifted, self._unpacked_seqlen = tokens_1T, shifted, unpacked_seqlen
        self._start = on_device(cu_seqlens_padded, device).long()
        self._ends = self._start if cu_seqlens is None else on_device(cu_seqlens, device).long()
        self._parts = SequenceParts(cp_group, self._start)

    def labels(self) -> Tensor:
        if self._shifted:
            return self._tokens_1T.long()
        return self._parts.split(next_tokens(self._tokens_1T, self._ends, self._start), 1)

    def results(self, x_BP: Tensor, fault: ValueError | None = None) -> Tensor:
        x_T = self._parts.gather_or_refuse(x_BP, 1, self._fault or fault)[0]
        documents, width = self._start.shape[0] - 1, self._unpacked_seqlen - 1
        lengths = self._ends.diff()
        place = torch.arange(x_T.shape[0], device=x_T.device)
        document = torch.searchsorted(self._start[1:].contiguous(), place, right=True)
        column = place - self._start[document]
        kept = (column < lengths[document] - 1) & (column < width)
        target = (document * width + column).where(kept, documents * width)  # others go to the end, which is cut off
        return x_T.new_zeros(documents * width + 1).scatter(0, target, x_T)[:-1].view(documents, width)


class PermutedTargets:
    """Targets of sequences in any order over the ranks of `cp_group`: place i of the ranks' joined parts is position
    `order[i]`.

    Hugging Face models under torch's `context_parallel` have such sequences. The gradient of a result goes to the rank
    that computed it, from that rank's own copy, as with `DTensor.full_tensor()`: every rank must compute the same loss.
    FSDP averages gradients over data- and context-parallel ranks; for a sum, multiply the loss by their number.

    Args:
        tokens_BP: `[B, P]`, this rank's unshifted token ids.
        order: integers `[S]`, S = W * P.

    Communicates: `labels` 1 all-gather of tokens, `results` 1 all-gather; backward nothing.

    Raises:
        ValueError: `order` has another length, or does not name each position once.
    """

    def __init__(self, tokens_BP: Tensor, shape_BP: torch.Size, cp_group: Group, order: Tensor):
        _check_tokens(tokens_BP, shape_BP[0])
        ranks = group_size(check_group(cp_group, "cp_group"))
        if tokens_BP.shape != shape_BP or tuple(order.shape) != (shape_BP[1] * ranks,):
            raise ValueError(
                f"seq_index has shape {tuple(order.shape)}, target {tuple(tokens_BP.shape)} and logits "
                f"{tuple(shape_BP)} on each of {ranks} context-parallel ranks: target and logits must be sharded "
                f"alike, and seq_index must be [{shape_BP[1] * ranks}], the position of every place"
            )
        demand(
            (order.sort().values == torch.arange(order.shape[0], device=order.device)).all(),
            lambda found: f"seq_index{found}: it must hold each position from 0 to {order.shape[0] - 1} once",
            order,
        )
        self._tokens_BP, self._order, self._group = tokens_BP, order, cp_group

    def labels(self) -> Tensor:
        places = self._order.argsort()
        labels_BS = next_tokens(all_gather(self._tokens_BP, self._group, 1)[:, places])
        return labels_BS[:, self._order].chunk(group_size(self._group), 1)[group_rank(self._group)]

    def results(self, x_BP: Tensor, fault: ValueError | None = None) -> Tensor:
        parts = [*told_parts(x_BP.detach(), self._group, 1, fault).unbind(1)]
        parts[group_rank(self._group)] = x_BP
        return torch.cat(parts, 1)[:, self._order.argsort()][:, :-1]


def _check_tokens(tokens: Tensor, batch: int) -> None:
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[0] != batch:
        found = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"target is {found}: it must be token ids [{batch}, sequence], batch size as of the logits")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"target is {tokens.dtype}: it must be integer token ids; cast it with .long()")


def _check_lengths(cu_seqlens: Tensor, cu_seqlens_padded: Tensor, longest: int) -> None:
    """Raise ValueError unless lengths begin with 0, never fall, and fit into the padded lengths and into `longest`."""
    if cu_seqlens.shape != cu_seqlens_padded.shape:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}, cu_seqlens_padded {tuple(cu_seqlens_padded.shape)}: they "
            f"must be equal, one entry per document and one more"
        )
    if cu_seqlens.device.type == "cpu":
        cu_seqlens = on_device(cu_seqlens, cu_seqlens_padded.device)
    lengths, places = cu_seqlens.diff(), on_device(cu_seqlens_padded, cu_seqlens.device).diff()
    demand(
        (cu_seqlens[0] == 0) & ((lengths >= 0) & (lengths <= places) & (lengths <= longest)).all(),
        lambda found: (
            f"cu_seqlens{found}: it must begin with 0, with document lengths from 0 to unpacked_seqlen ({longest}) "
            f"that fit the places of cu_seqlens_padded; pass the cumulative lengths without padding"
        ),
        cu_seqlens,
    )
