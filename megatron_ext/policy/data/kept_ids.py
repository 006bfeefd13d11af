"""The ids that a generator kept where it drew each token, as a batch has them: replay of its sampling mask.

Legend: B rows, S positions, K ids, at most, that were kept at a token.
"""

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.head.readouts.kept import check_kept_rows
from megatron_ext.sequence.targets import IGNORE_INDEX

KEPT_IDS = "kept_token_ids"  # the key of `[B, S, K]` integers, -1 for none


def replayed(labels: Tensor, kept: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`labels` `[...]`, ignored where nothing was kept, and `(offsets, ids)` of what was, for `Sampled`.

    `kept`: `[..., K]`, ids plus 1, and 0 for none. Waits for the device, as `Kept` does.
    """
    there = kept > 0
    lengths = there.sum(-1)
    offsets = F.pad(lengths.flatten().cumsum(0), (1, 0))
    return labels.where(lengths > 0, IGNORE_INDEX), (offsets, kept[there].long() - 1)


def check_kept_ids(tokens_BS: Tensor, kept_BSK: Tensor, vocabulary: int) -> None:
    """Raises ValueError unless each token that has kept ids is among them, none is there twice, and all are tokens."""
    if kept_BSK.is_floating_point() or kept_BSK.shape[:2] != tokens_BS.shape or bool((kept_BSK < -1).any()):
        raise ValueError(
            f"{KEPT_IDS} is {kept_BSK.dtype} {list(kept_BSK.shape)}: it must be integers [rows, positions, ids], the "
            f"ids that were kept where each token was drawn, -1 for none; pad it so"
        )
    labels_BS, (offsets, ids) = replayed(tokens_BS, kept_BSK + 1)
    try:
        check_kept_rows(labels_BS, offsets, ids, vocabulary, IGNORE_INDEX)
    except ValueError as fault:
        raise ValueError(f"{KEPT_IDS} of input_ids, as labels: {fault}; fill up with -1") from None
