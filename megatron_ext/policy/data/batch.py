"""Batches of right-padded rows as dicts, their cut into micro-batches, and rows as the model takes them.

A micro-batch is a list of row numbers. Each row is in exactly one, and `unit` consecutive rows (the pairs of DPO) stay
together. Legend: B rows, S positions; `input_ids` is `[B, S]`, `input_lengths` `[B]`; T tokens of a pack; K: the most
ids that a generator kept for one draw.
"""

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.head.readouts.kept import check_kept_rows
from megatron_ext.sequence.targets import IGNORE_INDEX

KEPT_IDS = "kept_token_ids"  # the key of `[B, S, K]` integers, -1 for none


class BatchedDataDict(UserDict[str, Any]):
    """A dict whose values are tensors or lists of the same number of rows. Dim 1 of a tensor is its sequence."""

    @property
    def size(self) -> int:
        """Number of rows; 0 of an empty dict.

        Raises:
            ValueError: values have different numbers of rows.
        """
        sizes = dict(zip(self, map(len, self.values()), strict=True))
        if len(set(sizes.values())) > 1:
            raise ValueError(f"data has rows {sizes}: every value must have as many; cut or repeat the odd one")
        return next(iter(sizes.values()), 0)

    def slice(self, start: int, end: int) -> "BatchedDataDict":
        """Rows `start` to `end`, as views where they are tensors."""
        return BatchedDataDict({name: value[start:end] for name, value in self.items()})

    def get_batch(self, batch_idx: int, batch_size: int) -> "BatchedDataDict":
        """The `batch_idx`-th run of `batch_size` rows."""
        return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)

    def select_indices(self, indices: Sequence[int]) -> "BatchedDataDict":
        """The rows of these indices, in their order.

        Raises:
            ValueError: indices are not integers, but for example a boolean mask of rows.
        """
        found, rows = BatchedDataDict(), torch.as_tensor(indices)
        if len(rows) and (rows.is_floating_point() or rows.dtype == torch.bool):
            raise ValueError(f"indices are {rows.dtype}: they must be numbers of rows; of a mask pass its nonzero()")
        rows = rows.long()
        for name, value in self.items():
            found[name] = value[rows.to(value.device)] if isinstance(value, Tensor) else [value[i] for i in indices]
        return found

    def cut(self, length: int) -> "BatchedDataDict":
        """Cut every tensor whose sequence is as long as that of `input_ids` to `length` positions; keep all others."""
        whole = self["input_ids"].shape[1]

        def shorter(value: Any) -> Any:
            along = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == whole
            return value[:, :length] if along else value

        return BatchedDataDict({name: shorter(value) for name, value in self.items()})

    def to(self, device: torch.device | str) -> "BatchedDataDict":
        """Move the tensors, in place, and return the dict."""
        for name, value in self.items():
            self[name] = value.to(device) if isinstance(value, Tensor) else value
        return self

    def shard_by_batch_size(self, shards: int, batch_size: int | None = None) -> list["BatchedDataDict"]:
        """Cut the rows for `shards` data-parallel ranks: each gets an equal run out of every `batch_size` rows.

        The i-th runs of all ranks make the i-th global batch. `batch_size` None: all rows are one batch.

        Raises:
            ValueError: the number of rows is no multiple of `batch_size`, or `batch_size` none of `shards`.
        """
        batch_size = self.size if batch_size is None else batch_size
        if batch_size < 1 or self.size % batch_size or batch_size % shards:
            raise ValueError(
                f"{self.size} rows in batches of {batch_size} over {shards} shards: rows must be a multiple of the "
                f"batch size, and that of the shards; drop or repeat rows"
            )
        own = batch_size // shards
        starts = [[first + shard * own for first in range(0, self.size, batch_size)] for shard in range(shards)]
        return [self.select_indices([i for start in runs for i in range(start, start + own)]) for runs in starts]

    @classmethod
    def from_batches(
        cls, batches: Iterable[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> "BatchedDataDict":
        """Join the rows of all batches, tensors right-padded to the longest with their `pad_value_dict` value, or 0.

        Raises:
            ValueError: batches have different keys.
        """
        batches = list(batches)
        if odd := [sorted({*batch} ^ {*batches[0]}) for batch in batches if {*batch} != {*batches[0]}]:
            raise ValueError(f"batches differ in the keys {', '.join(odd[0])}: every one must have all; add them")

        def join(name: str) -> Any:
            values = [batch[name] for batch in batches]
            if not isinstance(values[0], Tensor):
                return [row for value in values for row in value]
            if values[0].dim() > 1:
                longest = max(value.shape[1] for value in values)
                fill = (pad_value_dict or {}).get(name, 0)
                behind = [[0, 0] * (value.dim() - 2) + [0, longest - value.shape[1]] for value in values]
                values = [F.pad(value, pad, value=fill) for value, pad in zip(values, behind, strict=True)]
            return torch.cat(values)

        return cls({name: join(name) for name in (batches[0] if batches else ())})

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator["BatchedDataDict"]:
        """Runs of `microbatch_size` rows; the last one may be shorter."""
        return map(self.select_indices, fixed(self.size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(self, tokens: int) -> Iterator["BatchedDataDict"]:
        """Micro-batches of rows of similar length, cut to their longest row, of at most `tokens` positions each."""
        for rows in within_tokens(self["input_lengths"].tolist(), tokens):
            yield self.select_indices(rows).cut(int(self["input_lengths"][rows].max()))

    def get_microbatch_iterator_dynamic_shapes_len(self, tokens: int) -> int:
        """Count the micro-batches of `make_microbatch_iterator_with_dynamic_shapes`."""
        return len(within_tokens(self["input_lengths"].tolist(), tokens))

    def make_microbatch_iterator_for_packable_sequences(self, tokens: int) -> Iterator["BatchedDataDict"]:
        """Micro-batches of rows to be laid end to end, of at most `tokens` tokens each, not counting padding."""
        return map(self.select_indices, packed(self["input_lengths"].tolist(), tokens))

    def get_microbatch_iterator_for_packable_sequences_len(self, tokens: int) -> tuple[int, int]:
        """Count the micro-batches of `make_microbatch_iterator_for_packable_sequences`; return the longest row too."""
        lengths = self["input_lengths"].tolist()
        return len(packed(lengths, tokens)), max(lengths)


def fixed(rows: int, size: int, unit: int = 1) -> list[list[int]]:
    """Runs of `size` rows, in order; the last may be shorter."""
    if size < 1 or size % unit or rows % unit:
        raise ValueError(
            f"micro-batch size is {size} for {rows} rows: both must be a positive multiple of {unit}, rows that stay "
            f"together"
        )
    return [list(range(start, min(start + size, rows))) for start in range(0, rows, size)]


def within_tokens(lengths: Sequence[int], tokens: int, unit: int = 1) -> list[list[int]]:
    """Group rows of similar lengths: padded to its longest row, a group takes at most `tokens` positions."""
    found: list[list[int]] = []
    longest = 0
    for rows in sorted(_units(lengths, unit), key=lambda rows: -max(lengths[i] for i in rows)):
        if found and longest * (len(found[-1]) + unit) <= tokens:
            found[-1] += rows
            continue
        longest = max(lengths[i] for i in rows)
        _check_fits(longest * unit, tokens, rows)
        found.append(rows)
    return found


def packed(lengths: Sequence[int], tokens: int, unit: int = 1) -> list[list[int]]:
    """Group rows so that each group has at most `tokens` tokens, by first-fit decreasing.

    This needs at most 11/9 of the fewest groups, plus one (Yue, 1991).
    """
    found: list[list[int]] = []
    room: list[int] = []

    def length(rows: list[int]) -> int:
        return sum(lengths[i] for i in rows)

    for rows in sorted(_units(lengths, unit), key=length, reverse=True):
        need = length(rows)
        _check_fits(need, tokens, rows)
        bin_ = next((i for i, left in enumerate(room) if left >= need), None)
        if bin_ is None:
            found.append(rows)
            room.append(tokens - need)
        else:
            found[bin_] += rows
            room[bin_] -= need
    return found


def _units(lengths: Sequence[int], unit: int) -> list[list[int]]:
    if len(lengths) % unit:
        raise ValueError(f"{len(lengths)} rows: they must be a multiple of {unit}, rows that belong together")
    return [list(range(start, start + unit)) for start in range(0, len(lengths), unit)]


def _check_fits(need: int, tokens: int, rows: list[int]) -> None:
    if need > tokens:
        raise ValueError(
            f"rows {rows} take {need} tokens, a micro-batch holds {tokens}: raise train_mb_tokens or "
            f"logprob_mb_tokens, or shorten the rows"
        )


def inside_rows(data: Mapping[str, Any]) -> Tensor:
    """bool `[B, S]`: the tokens of right-padded rows, whose "input_lengths" may be missing if they have no padding."""
    tokens_BS = data["input_ids"]
    column_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    lengths = data.get("input_lengths")
    return torch.ones_like(tokens_BS, dtype=torch.bool) if lengths is None else column_S < lengths[:, None]


def counted(data: Mapping[str, Any]) -> Tensor:
    """bool `[B, S]`: the tokens of rows, but for those where `token_mask` `[B, S]` or `sample_mask` `[B]` is 0."""
    counts_BS = inside_rows(data)
    if (tokens := data.get("token_mask")) is not None:
        counts_BS = counts_BS & (tokens != 0)
    if (rows := data.get("sample_mask")) is not None:
        counts_BS = counts_BS & (rows != 0)[:, None]
    return counts_BS


@dataclass(frozen=True)
class Rows:
    """Right-padded rows, as the model takes them.

    Attributes:
        tokens: `[B, S]`, or packed `[1, T]`.
        cu_seqlens: where packed documents begin, and the last one ends; None: not packed.
        inside_BS: bool, the tokens of the rows.
        place_BS: if packed, the place of each position among `tokens`, 0 outside the rows.
    """

    tokens: Tensor
    inside_BS: Tensor
    cu_seqlens: Tensor | None = None
    place_BS: Tensor | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any], pack: bool, multiple: int = 1) -> "Rows":
        """Lay out the rows of `data`; with `pack` end to end, each in a multiple of `multiple` places."""
        tokens_BS, inside_BS = data["input_ids"], inside_rows(data)
        if not pack:
            return cls(tokens_BS, inside_BS)
        lengths_B = inside_BS.sum(1)
        places_B = (lengths_B + multiple - 1) // multiple * multiple
        ends_B = places_B.cumsum(0)
        tokens_T = tokens_BS.new_zeros(int(ends_B[-1]))
        place_BS = (ends_B - places_B)[:, None] + torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        tokens_T[place_BS[inside_BS]] = tokens_BS[inside_BS]
        cu_seqlens = torch.cat([ends_B.new_zeros(1), ends_B])
        return cls(tokens_T[None], inside_BS, cu_seqlens, place_BS.where(inside_BS, 0))

    def laid(self, x_BSK: Tensor) -> Tensor:
        """Lay out numbers of each position like `tokens`; in a pack 0 where there is no token."""
        if self.place_BS is None:
            return x_BSK
        laid_TK = x_BSK.new_zeros(self.tokens.shape[1], x_BSK.shape[2])
        laid_TK[self.place_BS[self.inside_BS]] = x_BSK[self.inside_BS]
        return laid_TK[None]

    def labels_that_count(self, data: Mapping[str, Any]) -> Tensor:
        """`tokens`, with -100 where one does not count."""
        return self.tokens.masked_fill(self.laid(counted(data)[..., None])[..., 0].logical_not(), -100)

    def at_positions(self, found: Tensor) -> Tensor:
        """Return `found`, computed at each of `tokens`, as `[B, S, ...]`; 0 outside the rows."""
        return self._of_places(found).where(_along(self.inside_BS, found), 0)

    def at_tokens(self, found: Tensor) -> Tensor:
        """Return `found`, computed for the token after each, as `[B, S, ...]`; 0 for the first, and outside rows."""
        counts_BS = self.inside_BS.index_fill(1, torch.zeros(1, dtype=torch.int64, device=found.device), False)
        return self._of_places(found).roll(1, 1).where(_along(counts_BS, found), 0)

    def _of_places(self, found: Tensor) -> Tensor:
        return found if self.place_BS is None else found[0][self.place_BS]


def _along(mask_BS: Tensor, found: Tensor) -> Tensor:
    """View the mask as `[B, S, 1, ...]`, with as many dims as `found`."""
    return mask_BS.view(*mask_BS.shape, *[1] * (found.dim() - 2))


def replayed(labels: Tensor, kept: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return `labels` `[...]`, `IGNORE_INDEX` where no ids were kept, and the kept ids as `Sampled` takes them.

    `kept`: `[..., K]`, ids plus 1, and 0 for none. Waits for the device, as `Kept` does.
    """
    there = kept > 0
    lengths = there.sum(-1)
    offsets = F.pad(lengths.flatten().cumsum(0), (1, 0))
    return labels.where(lengths > 0, IGNORE_INDEX), (offsets, kept[there].long() - 1)


def check_kept_ids(tokens_BS: Tensor, kept_BSK: Tensor, vocabulary: int) -> None:
    """Raise ValueError unless each token with kept ids is among them, and they are distinct ids of the vocabulary."""
    if kept_BSK.is_floating_point() or kept_BSK.shape[:2] != tokens_BS.shape or bool((kept_BSK < -1).any()):
        raise ValueError(
            f"{KEPT_IDS} is {kept_BSK.dtype} {list(kept_BSK.shape)}: it must be integers [rows, positions, ids], the "
            f"ids that were kept where each token was drawn, -1 for none; pad it so"
        )
    labels_BS, (offsets, ids) = replayed(tokens_BS, kept_BSK.long() + 1)
    try:
        check_kept_rows(labels_BS, offsets, ids, vocabulary, IGNORE_INDEX)
    except ValueError as fault:
        raise ValueError(f"{KEPT_IDS} of input_ids, as labels: {fault}; fill up with -1") from None
