"""One line of documents ("THD") from a batch of padded, packed rows ("BSHD").

Suffixes: B rows, S positions of a row, N documents of a row (filled up with a sentinel), T = B * S positions of the
line, E documents of the line.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.sequence.zigzag import demand, thd_partition_indices

partition_indices = thd_partition_indices  # a second public name


def check_shapes(batch: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a batch of rows has the shapes that `cp_utils.make_cp_batch_for_te` names."""
    shape = list(batch["input_ids"].shape)
    if len(shape) not in (2, 3):
        raise ValueError(f"input_ids has shape {shape}: it must be [batch, tokens] or [batch, tokens, channels]")
    rows, places = shape[:2]
    if list(batch["labels"].shape) != [rows, places]:
        raise ValueError(f"labels has shape {list(batch['labels'].shape)}: it must be {[rows, places]}, as input_ids")
    positions = batch.get("position_ids")
    if positions is not None and list(positions.shape) not in ([rows, places], [1, places]):
        raise ValueError(f"position_ids has shape {list(positions.shape)}: it must be {[rows, places]}, as input_ids")
    found = [list(batch[name].shape) for name in ("seq_lens", "seq_lens_padded")]
    if found[0] != found[1] or len(found[0]) != 2 or found[0][0] != rows:
        raise ValueError(
            f"seq_lens and seq_lens_padded have shapes {found[0]} and {found[1]}: both must be [{rows}, documents of a "
            f"row]; fill up rows of fewer documents with the padding value"
        )


def to_thd(batch: dict[str, Tensor], padding_token_id: int, sentinel: int) -> dict[str, Tensor]:
    """Join the rows of `batch` end to end; `cp_utils.make_cp_batch_for_te` describes the batch and the result.

    Raises:
        ValueError: lengths that do not fit each other.
    """
    input_ids, labels_BS = batch["input_ids"], batch["labels"]
    rows, places = input_ids.shape[:2]
    lengths_BN, padded_BN = batch["seq_lens"], batch["seq_lens_padded"]
    _check_lengths(lengths_BN, padded_BN, places, sentinel)

    known_BN = padded_BN != sentinel
    lengths_E, padded_E = lengths_BN[known_BN], padded_BN[known_BN]
    ends_E = padded_E.cumsum(0)
    total = rows * places
    place_T = torch.arange(total, device=input_ids.device)
    # The search skips empty documents, whose end is that of the document before.
    document_T = torch.searchsorted(ends_E, place_T, right=True)
    inside_T = place_T - (ends_E - padded_E)[document_T]

    ids = input_ids.flatten(0, 1)
    padding_mask_T = inside_T >= lengths_E[document_T]
    if ids.dim() == 1:
        padding_mask_T |= ids == padding_token_id
    position_ids = batch.get("position_ids")
    return {
        "input_ids": ids,
        "labels": labels_BS.flatten(),
        "position_ids": inside_T if position_ids is None else position_ids.flatten(),
        "padding_mask": padding_mask_T,
        "cu_seqlens": _cumulative(lengths_E),
        "cu_seqlens_padded": _cumulative(padded_E),
    }


def stack_lines(lines: list[dict[str, Any]], sentinel: int) -> dict[str, Any]:
    """Stack the lines to one batch with a leading dim; cumulative lengths are filled up with `sentinel`."""
    documents = max(line["cu_seqlens"].shape[0] for line in lines)
    stacked = dict(lines[0])
    for name in [name for name, x in stacked.items() if isinstance(x, Tensor)]:
        tensors = [line[name] for line in lines]
        if name.startswith("cu_seqlens"):
            tensors = [F.pad(x, (0, documents - x.shape[0]), value=sentinel) for x in tensors]
        stacked[name] = torch.stack(tensors)
    return stacked


def _cumulative(lengths_E: Tensor) -> Tensor:
    return F.pad(lengths_E.cumsum(0), (1, 0)).to(torch.int32)


def _check_lengths(lengths_BN: Tensor, padded_BN: Tensor, places: int, sentinel: int) -> None:
    known = padded_BN != sentinel
    demand(
        ((lengths_BN != sentinel) == known).all(),
        lambda found: f"seq_lens{found}: it must have the padding value {sentinel} just where seq_lens_padded has it",
        lengths_BN,
    )
    demand(
        (~known | ((lengths_BN >= 0) & (lengths_BN <= padded_BN))).all(),
        lambda found: f"seq_lens{found}: a document's tokens must not outnumber the places in seq_lens_padded",
        lengths_BN,
    )
    demand(
        (padded_BN.where(known, 0).sum(1) == places).all(),
        lambda found: (
            f"seq_lens_padded{found}: the documents of each row must take all of its {places} places; count the "
            f"padding at a row's end with its last document"
        ),
        padded_BN,
    )
