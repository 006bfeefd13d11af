"""Multi-token prediction's acceptance counts, answered by the head's hits instead of an argmax over logits.

From 0.19 on Megatron counts, for each layer of multi-token prediction, how many labels have the largest logit. The
head knows that from its pass over the vocabulary: nothing more is computed or communicated.
"""

from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from megatron_ext.megatron.fused_loss import patch_points
from megatron_ext.megatron.fused_loss.promised_logits import PromisedLogits

COUNTS = "_compute_mtp_acceptance_counts"


def counts_acceptance() -> bool:
    """Return whether this Megatron counts."""
    return hasattr(multi_token_prediction, COUNTS)


def wants_hits(model: Any) -> bool:
    """Return whether acceptance will be counted in this call of the model."""
    return bool(counts_acceptance() and model.training and patch_points.multi_token_layers(model))


def counts_by_hits(original: Any) -> Any:
    """Megatron's function, which need not be asked where the loss of promised logits has found the hits."""

    def counts(mtp_logits: Tensor, mtp_labels: Tensor, loss_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = mtp_logits.terms.hits if isinstance(mtp_logits, PromisedLogits) else None
        if found is None or found[0] is not mtp_labels:
            return original(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
        with torch.no_grad():
            valid_SB = loss_mask.transpose(0, 1).bool()
            return (found[1] & valid_SB).sum().float(), valid_SB.sum().float()

    return counts
