"""Owners of token ids."""

from dataclasses import dataclass

from torch import Tensor

from megatron_ext.distributed.groups import Group, check_group, group_rank, group_size
from megatron_ext.distributed.sizes import check_size


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns `[start, stop)` of a vocabulary of `size` token ids.

    A vocabulary is often padded so that it divides by the number of ranks: a shard may reach past `size`, and those
    columns never count (they get no probability and no gradient). Shards may be uneven, and even empty.

    Raises:
        ValueError: numbers that are not whole, `0 <= start <= stop` and `size >= 1` do not hold, or (of the class's
            functions) `group` is no process group that holds this rank.

    Attributes:
        start: first token id of the shard, also of a padded one.
        stop: one past its last column; `stop - start` is the number of rows of the weight shard.
        size: number of token ids that exist, over all ranks. The largest valid label is `size - 1`.
    """

    start: int
    stop: int
    size: int

    def __post_init__(self) -> None:
        start, stop, size = self.start, self.stop, self.size
        if type(start) is type(stop) is type(size) is int and 0 <= start <= stop and size > 0:
            return  # the functions below would take a part of a small call's time
        check_size("vocab start", self.start)
        check_size("vocab stop", self.stop)
        check_size("vocab size", self.size, 1)
        if self.stop < self.start:
            raise ValueError(
                f"vocab start {self.start}, stop {self.stop}: must satisfy 0 <= start <= stop; pass where the shard's "
                f"columns begin and one past the last"
            )

    @classmethod
    def equal(cls, columns: int, group: Group, size: int | None = None) -> "VocabShard":
        """The shard of a rank that holds `columns` columns, as every rank of `group` does, in rank order.

        `size`: the true vocabulary size where the last columns are padding; None: all columns count.
        """
        check_size("columns", columns)
        start = columns * group_rank(check_group(group, "group"))
        return cls(start, start + columns, columns * group_size(group) if size is None else size)

    @classmethod
    def split(cls, size: int, group: Group) -> "VocabShard":
        """The shard of this rank when `size` token ids are split over `group`, the first ranks one longer if uneven."""
        check_size("vocab size", size, 1)
        ranks, rank = group_size(check_group(group, "group")), group_rank(group)
        base, extra = divmod(size, ranks)
        start = rank * base + min(rank, extra)
        return cls(start, start + base + (rank < extra), size)

    @classmethod
    def chunk(cls, size: int, group: Group) -> "VocabShard":
        """The shard of this rank when DTensor or `torch.chunk` cut `size` token ids: the last ranks get less."""
        check_size("vocab size", size, 1)
        longest = -(-size // group_size(check_group(group, "group")))
        start = min(longest * group_rank(group), size)
        return cls(start, min(start + longest, size), size)

    @property
    def columns(self) -> int:
        """Number of columns of the shard, padding included."""
        return self.stop - self.start

    @property
    def counted(self) -> int:
        """Number of columns of the shard that count: those below `size`."""
        return max(0, min(self.stop, self.size) - self.start)

    def owns(self, token_ids: Tensor) -> Tensor:
        """bool, the shape of `token_ids`: which of them are this shard's."""
        return (token_ids >= self.start) & (token_ids < min(self.stop, self.size))
