"""Split of a batch into micro-batches over ranks: validated and agreed on before anything is computed.

Legend: B rows of this data-parallel rank, S positions.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.policy.data.agreement_of_ranks import agree
from megatron_ext.policy.data.batch import (
    KEPT_IDS,
    BatchedDataDict,
    check_kept_ids,
    counted,
    fixed,
    inside_rows,
    packed,
    within_tokens,
)
from megatron_ext.policy.losses.worker_protocol import LossInputType, LossType, rows_together, valid_counts

TEACHER_IDS = "teacher_topk_indices"  # the key of `[B, S, K]` integers


@dataclass(frozen=True)
class RankCoordinates:
    """This rank's place among `dp_size` data-parallel ranks, and the number of ranks that get the same rows: `copies`
    (cp * tp) in each of `stages` of a pipeline. Global ranks count through (stages, dp, copies), copies fastest."""

    dp_rank: int = 0
    dp_size: int = 1
    copies: int = 1
    stages: int = 1

    def replica(self, rank: int) -> int:
        """Return the data-parallel rank of a global rank."""
        return rank // self.copies % self.dp_size

    def first_ranks(self, stage: int = 0) -> range:
        """Return one global rank of each data-parallel rank, on this stage."""
        begin = stage * self.dp_size * self.copies
        return range(begin, begin + self.dp_size * self.copies, self.copies)


class Counts(NamedTuple):
    """Numbers of rows and tokens that count, by which losses divide, under the names that losses give them."""

    global_valid_seqs: float
    global_valid_toks: float


# One rank's rows of micro-batches, its numbers of rows and tokens that count, and a checksum of the data that is read.
_Share = tuple[list[list[int]], float, float, int]


@dataclass(frozen=True)
class Step:
    """A global batch on this rank.

    Attributes:
        micro_batches: rows of each micro-batch.
        passes: the number of passes of every rank; a rank with fewer micro-batches repeats its first, without effect.
        counts: the counts of the global batch.
    """

    micro_batches: list[list[int]]
    passes: int
    counts: Counts

    def rows(self) -> list[tuple[list[int], bool]]:
        """Return for each pass its rows, and whether the pass counts."""
        repeated = [(self.micro_batches[0], False)] * (self.passes - len(self.micro_batches))
        return [(rows, True) for rows in self.micro_batches] + repeated


@dataclass(frozen=True)
class MicroBatchBounds:
    """Bounds of a micro-batch: rows (kind "fixed"), or tokens, each row in a multiple of `multiple` places.

    Token ids are below `vocabulary`. `at_most`: the most tokens of a micro-batch that the masks of the data may leave;
    None: there is no such bound.
    """

    kind: str
    rows: int
    tokens: int
    vocabulary: int
    multiple: int = 1
    at_most: int | None = None

    def cut(self, data: BatchedDataDict, unit: int = 1) -> list[list[int]]:
        if self.kind == "fixed":
            found = fixed(data.size, self.rows, unit)
        else:
            lengths = [-(-n // self.multiple) * self.multiple for n in data["input_lengths"].tolist()]
            found = (packed if self.kind == "packed" else within_tokens)(lengths, self.tokens, unit)
        if self.at_most is not None and "token_mask" in data:
            left_B = counted(data)[:, 1:].sum(1)  # nothing predicts the first token
            most = max((int(left_B[rows].sum()) for rows in found), default=0)
            if most > self.at_most:
                raise ValueError(
                    f"skip_masked_tokens is {self.at_most}, and the masks leave {most} tokens of a micro-batch: it "
                    f"must bound them; raise it, or set it to True"
                )
        return found


def training_steps(
    data: Mapping[str, Any],
    loss_fn: Any,
    global_batch_size: int | None,
    bounds: MicroBatchBounds,
    coordinates: RankCoordinates,
) -> list[Step]:
    """Plan the global batches in `data`, which holds this rank's rows of each, one batch after the other. With
    `global_batch_size` None there is one batch, and the ranks may have different numbers of rows.

    Communicates: two collectives of a few bytes over all ranks.

    Raises:
        ValueError: on every rank, if the data of one of them cannot be trained on; the message says why.
    """

    def prepare() -> list[_Share]:
        batch = checked(data, needs := _needs(loss_fn, bounds), bounds.vocabulary)
        own, checksum = (rows := batch.size), _checksum(batch, (*needs, "token_mask", "input_lengths"))
        if global_batch_size is not None:
            own = _own_rows(rows, global_batch_size, bounds, coordinates)
        shares = []
        for first in range(0, rows, own):
            part = batch.slice(first, first + own)
            cut = [[first + row for row in rows] for rows in bounds.cut(part, rows_together(loss_fn))]
            shares.append((cut, *valid_counts(part, getattr(loss_fn, "unit", 1)), checksum))
        return shares

    return _agreed(prepare, coordinates)


def _own_rows(rows: int, global_batch_size: int, bounds: MicroBatchBounds, coordinates: RankCoordinates) -> int:
    """Count this rank's rows of a global batch."""
    own, rest = divmod(global_batch_size, coordinates.dp_size)
    if rest or rows % own:
        raise ValueError(
            f"data has {rows} rows on each of {coordinates.dp_size} data-parallel ranks, the global batch size is "
            f"{global_batch_size}: it must divide by {coordinates.dp_size}, and rows by the quotient; "
            f"drop or repeat rows"
        )
    if bounds.kind == "fixed" and own % bounds.rows:
        raise ValueError(
            f"a global batch of {global_batch_size} has {own} rows on a rank, a micro-batch {bounds.rows}: the rows "
            f"must be a multiple of it; change train_micro_batch_size (mbs) or train_global_batch_size (gbs)"
        )
    return own


def scoring_step(data: Mapping[str, Any], bounds: MicroBatchBounds, coordinates: RankCoordinates) -> Step:
    """Plan one pass over all rows of `data`; communication and errors are those of `training_steps`."""

    def prepare() -> list[_Share]:
        batch = checked(data, needs := ("input_ids", "input_lengths"), bounds.vocabulary)
        return [(bounds.cut(batch), 0.0, 0.0, _checksum(batch, needs))]

    return _agreed(prepare, coordinates)[0]


def _checksum(batch: Mapping[str, Any], needs: Iterable[str]) -> int:
    """Checksum of the tensors of these names, by which ranks detect that they were given different ones."""
    found = 0
    for name in dict.fromkeys((*needs, KEPT_IDS)):
        if isinstance(x := batch.get(name), Tensor):
            found = zlib.crc32(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, found)
    return found


def _agreed(prepare: Callable[[], list[_Share]], coordinates: RankCoordinates) -> list[Step]:
    """Exchange the ranks' shares, check that they fit together, and return this rank's steps."""
    found = agree(prepare)
    for replica, first in enumerate(coordinates.first_ranks()):
        ranks = [rank for rank in range(len(found)) if coordinates.replica(rank) == replica]
        if [found[rank] for rank in ranks] != [found[first]] * len(ranks):
            raise ValueError(
                f"ranks {', '.join(map(str, ranks))} hold shards of one model and got different data: tensor-, "
                f"context- and pipeline-parallel ranks must get the same rows; shard data by dp_rank"
            )
    shares = [found[first] for first in coordinates.first_ranks()]
    if len(set(map(len, shares))) > 1:
        sizes = [sum(len(rows) for cut, *_ in of_a_rank for rows in cut) for of_a_rank in shares]
        raise ValueError(f"data has {sizes} rows on the data-parallel ranks: all must have as many; shard it evenly")
    steps = []
    for number, (own, *_) in enumerate(shares[coordinates.dp_rank]):
        cuts, valid_seqs, valid_toks, _ = zip(*(of_a_rank[number] for of_a_rank in shares), strict=True)
        steps.append(Step(own, max(map(len, cuts)), Counts(sum(valid_seqs), sum(valid_toks))))
    return steps


def _needs(loss_fn: Any, bounds: MicroBatchBounds) -> list[str]:
    needs = [*getattr(loss_fn, "needs", ()), "input_ids", "sample_mask"]
    kind = getattr(loss_fn, "input_type", None)
    if getattr(kind, "value", kind) == LossInputType.DISTILLATION.value:
        needs += ["teacher_topk_logits", TEACHER_IDS]
    if bounds.kind != "fixed":
        needs.append("input_lengths")
    kind = getattr(getattr(loss_fn, "loss_type", None), "value", None)  # NeMo-RL's losses have an enum of their own
    return [*needs, "token_mask"] if kind == LossType.TOKEN_LEVEL.value else needs


def checked(data: Mapping[str, Any], needs: Iterable[str], vocabulary: int, least: int = 2) -> BatchedDataDict:
    """Return `data` if it has the keys `needs`, a row or more of at least `least` positions, and valid token ids."""
    batch, needed = BatchedDataDict(data), {*needs}
    if missing := sorted(needed - set(batch)):
        raise ValueError(f"data lacks {', '.join(missing)}: it has {', '.join(sorted(batch)) or 'nothing'}; add them")
    tokens_BS = batch["input_ids"]
    if not isinstance(tokens_BS, Tensor) or tokens_BS.dim() != 2 or tokens_BS.is_floating_point():
        raise ValueError("input_ids must be a tensor of integers [rows, positions]; pad the rows behind")
    if batch.size == 0 or tokens_BS.shape[1] < least:
        raise ValueError(f"input_ids are {list(tokens_BS.shape)}: there must be a row, of {least} tokens or more")
    lowest, highest = int(tokens_BS.min()), int(tokens_BS.max())
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"input_ids are {lowest} to {highest}: they must lie in 0 to {vocabulary - 1}, padding too, the ids of "
            "the model's vocabulary; use the tokenizer that the model was made with"
        )
    for name, dims in (("sample_mask", 1), ("input_lengths", 1), ("token_mask", 2), (KEPT_IDS, 3)):
        value = batch.get(name)
        if value is not None and (not isinstance(value, Tensor) or value.dim() != dims):
            found = list(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"{name} is {found}: it must be a tensor [{', '.join(('rows', 'positions', 'ids')[:dims])}]"
            )
        if value is not None and name.endswith("_mask") and bool((value < 0).any()):
            raise ValueError(f"{name} has a number below 0: set it to 0 where nothing counts, and else above 0")
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] != tokens_BS.shape[1]:
            raise ValueError(
                f"{name} is {list(value.shape)} and input_ids {list(tokens_BS.shape)}: dim 1 of every tensor is the "
                f"sequence; pad it alike"
            )
    lengths = batch.get("input_lengths")
    if lengths is not None and not bool(((lengths >= 1) & (lengths <= tokens_BS.shape[1])).all()):
        raise ValueError(f"input_lengths are {lengths.tolist()}: they must lie in 1 to {tokens_BS.shape[1]}")
    if KEPT_IDS in batch:
        check_kept_ids(tokens_BS, batch[KEPT_IDS], vocabulary)
    if TEACHER_IDS in needed:
        _check_teacher_ids(batch[TEACHER_IDS], inside_rows(batch), vocabulary)
    return batch


def _check_teacher_ids(ids_BSK: Any, inside_BS: Tensor, vocabulary: int) -> None:
    if not isinstance(ids_BSK, Tensor) or ids_BSK.dim() != 3 or ids_BSK.is_floating_point():
        found = f"{ids_BSK.dtype} {list(ids_BSK.shape)}" if isinstance(ids_BSK, Tensor) else type(ids_BSK).__name__
        raise ValueError(
            f"{TEACHER_IDS} is {found}: it must be integers [rows, positions, ids]; pass those of get_topk_logits()"
        )
    ids = ids_BSK[inside_BS]
    if len(wrong := ids[(ids < 0) | (ids >= vocabulary)]):
        raise ValueError(
            f"{TEACHER_IDS} has {int(wrong[0])} inside a row: the ids there must lie in 0 to {vocabulary - 1}, the "
            f"student's vocabulary; take the teacher's likeliest tokens among these"
        )
