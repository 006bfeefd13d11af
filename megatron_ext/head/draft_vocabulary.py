"""A draft head over a part of the target's vocabulary, as in EAGLE-3: labels, shards, and rows of the target's weight.

A draft id d stands for the target id `d + d2t[d]`, which rises with d. `d2t` and the mask `t2d` are buffers of
EAGLE-3's checkpoints (SpecForge, speculators, vLLM's `draft_id_to_target_id`). Here D is the number of draft ids.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.distributed.groups import VocabShard
from megatron_ext.head.checks import check_labels


class DraftLabels(NamedTuple):
    """Labels of a draft head.

    Attributes:
        labels: `[...]`, int64, draft ids; `ignore_index` where the target id has no draft id, or is `ignore_index`.
        outside: `[...]`, bool: the label is a target id without a draft id.
    """

    labels: Tensor
    outside: Tensor


class DraftVocabulary:
    """The ids of a target vocabulary that a draft head has columns for.

    Attributes:
        ids: `[D]`, int64, rising: the target id of each draft id.
        size: number of ids of the target vocabulary.
    """

    def __init__(self, d2t: Tensor, size: int):
        """Make the vocabulary; once, since the host waits for a CUDA device.

        Args:
            d2t: `[D]`, integers: each draft id's target id less the draft id.
            size: number of ids of the target vocabulary.

        Raises:
            ValueError: the target ids do not rise, or are not in `[0, size)`.
        """
        if not isinstance(d2t, Tensor) or d2t.dim() != 1 or d2t.is_floating_point() or not len(d2t):
            found = f"{d2t.dtype} {tuple(d2t.shape)}" if isinstance(d2t, Tensor) else type(d2t).__name__
            raise ValueError(f"d2t is {found}: it must be integers [D], D >= 1, what is added to each draft id")
        self.ids, self.size = d2t.long() + torch.arange(len(d2t), device=d2t.device), size
        if (self.ids.diff() <= 0).any() or self.ids[0] < 0 or self.ids[-1] >= size:
            raise ValueError(
                f"d2t leads to target ids from {self.ids[0]} to {self.ids[-1]} of {size}: they must rise and lie in "
                f"[0, {size}); pass what is added to draft ids, not target ids, and the target vocabulary's size"
            )
        self._draft_of = torch.full((size,), -1, device=d2t.device)
        self._draft_of[self.ids] = torch.arange(len(d2t), device=d2t.device)

    @classmethod
    def of_mask(cls, t2d: Tensor) -> "DraftVocabulary":
        """Make the draft vocabulary of the mask `t2d` `[V]`, bool: which target ids have a draft id.

        Raises:
            ValueError: `t2d` is no such mask, or is False everywhere.
        """
        if not isinstance(t2d, Tensor) or t2d.dim() != 1 or t2d.dtype != torch.bool:
            found = f"{t2d.dtype} {tuple(t2d.shape)}" if isinstance(t2d, Tensor) else type(t2d).__name__
            raise ValueError(f"t2d is {found}: it must be bool [V], which target ids have a draft id")
        ids = t2d.nonzero().squeeze(1)
        if not len(ids):
            raise ValueError(f"t2d is false for all {len(t2d)} ids: some must have a draft id; pass it as saved")
        return cls(ids - torch.arange(len(ids), device=ids.device), len(t2d))

    def __len__(self) -> int:
        return len(self.ids)

    def labels(self, labels: Tensor, ignore_index: int = -100) -> DraftLabels:
        """Return the draft ids of the target ids `labels` `[...]`, for every read-out of the draft head with labels.

        Raises:
            ValueError: a label is neither a target id nor `ignore_index`; or `ignore_index` is a draft id, so that
                read-outs would leave out its tokens.
        """
        if 0 <= ignore_index < len(self):
            raise ValueError(
                f"ignore_index is {ignore_index}, one of the {len(self)} draft ids: it must be none of them, as labels "
                f"become draft ids; pass labels.masked_fill(labels == {ignore_index}, -100)"
            )
        check_labels(labels, ignore_index, self.size)
        counts = labels.long() != ignore_index
        draft = self._draft_of.to(labels.device)[labels.long().where(counts, 0)]
        inside = counts & (draft >= 0)
        return DraftLabels(draft.where(inside, ignore_index), counts & ~inside)

    def shard(self, target: VocabShard) -> VocabShard:
        """Return the shard of the draft ids whose target ids are in `target`, a rank's shard of the target vocabulary.
        With these shards a draft head has its teacher's rows on the same rank. They are uneven, and may be empty.
        """
        ends = torch.tensor([target.start, target.stop], device=self.ids.device)
        start, stop = torch.searchsorted(self.ids, ends).tolist()
        return VocabShard(start, stop, len(self))

    def rows(self, weight: Tensor, target: VocabShard | None = None) -> Tensor:
        """Return the rows of the target head's `weight` (or the entries of its bias) that have draft ids, in the order
        of these ids: for a teacher over the draft ids alone, or to initialise a draft head.

        Args:
            weight: `[V/R, ...]`, this rank's shard.
            target: the shard of these rows; None: the whole vocabulary.

        Returns:
            A copy, one row for each draft id of `shard(target)`.

        Raises:
            ValueError: the weight does not have as many rows as the shard has columns.
        """
        whole: Any = VocabShard(0, self.size, self.size) if target is None else target
        if weight.shape[0] != whole.columns:
            raise ValueError(
                f"weight has {weight.shape[0]} rows, the target's shard {whole.columns} columns: they must be equal; "
                f"pass target=VocabShard(...) of this rank's rows"
            )
        mine = self.shard(whole)
        return weight.index_select(0, (self.ids[mine.start : mine.stop] - whole.start).to(weight.device))
