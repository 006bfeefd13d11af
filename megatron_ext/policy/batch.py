"""A batch of sequences as a dict of tensors and lists with one row each: cut, joined, moved, iterated in micro-batches.

Rows are right-padded. Legend: B rows, S positions; `input_ids` is `[B, S]`, `input_lengths` `[B]`.
"""

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.policy.data.micro_batches import fixed, packed, within_tokens


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
        """The rows of these indices, in their order."""
        found, rows = BatchedDataDict(), torch.as_tensor(indices, dtype=torch.int64)
        for name, value in self.items():
            found[name] = value[rows.to(value.device)] if isinstance(value, Tensor) else [value[i] for i in indices]
        return found

    def cut(self, length: int) -> "BatchedDataDict":
        """The first `length` positions of every tensor as long as `input_ids`; the other values as they are."""
        whole = self["input_ids"].shape[1]

        def shorter(value: Any) -> Any:
            along = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == whole
            return value[:, :length] if along else value

        return BatchedDataDict({name: shorter(value) for name, value in self.items()})

    def to(self, device: torch.device | str) -> "BatchedDataDict":
        """Moves the tensors, in place, and returns the dict."""
        for name, value in self.items():
            self[name] = value.to(device) if isinstance(value, Tensor) else value
        return self

    def shard_by_batch_size(self, shards: int, batch_size: int | None = None) -> list["BatchedDataDict"]:
        """Cut the rows for `shards` data-parallel ranks: each gets an equal run out of every `batch_size` rows.

        So each rank's i-th part and the others' make the i-th global batch. None: the whole is one batch.

        Raises:
            ValueError: rows do not divide by `batch_size`, or that by `shards`.
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
        """The rows of all batches; tensors are padded behind to the longest, with 0 or their value in the dict."""
        batches = list(batches)

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
        """Rows of similar length, cut to the longest of them, of at most `tokens` positions together."""
        for rows in within_tokens(self["input_lengths"].tolist(), tokens):
            yield self.select_indices(rows).cut(int(self["input_lengths"][rows].max()))

    def get_microbatch_iterator_dynamic_shapes_len(self, tokens: int) -> int:
        """Count the micro-batches of `make_microbatch_iterator_with_dynamic_shapes`."""
        return len(within_tokens(self["input_lengths"].tolist(), tokens))

    def make_microbatch_iterator_for_packable_sequences(self, tokens: int) -> Iterator["BatchedDataDict"]:
        """Rows of at most `tokens` tokens together without their padding: to be laid end to end."""
        return map(self.select_indices, packed(self["input_lengths"].tolist(), tokens))

    def get_microbatch_iterator_for_packable_sequences_len(self, tokens: int) -> tuple[int, int]:
        """Count the micro-batches of `make_microbatch_iterator_for_packable_sequences`; return the longest row too."""
        lengths = self["input_lengths"].tolist()
        return len(packed(lengths, tokens)), max(lengths)
