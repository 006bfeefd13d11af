"""Multi-token prediction's acceptance counts, answered by the head's hits instead of an argmax over logits.

From 0.19 on Megatron counts, for each layer of multi-token prediction, how many labels have the largest logit. The
head knows that from its pass over the vocabulary: nothing more is computed or communicated.
"""

import inspect
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from megatron_ext.megatron.fused_loss.promised_logits import PromisedLogits

COUNTS = "_compute_mtp_acceptance_counts"
_LOSSES = "process_mtp_loss"


def counts_acceptance() -> bool:
    """Whether this Megatron counts."""
    return hasattr(multi_token_prediction, COUNTS)


def wants_hits(model: Any) -> bool:
    """Whether acceptance will be counted in this call of the model."""
    return bool(counts_acceptance() and model.training and _layers(model))


def takes_losses_without_labels(model: Any) -> bool:
    """Whether Megatron trains the model's layers of multi-token prediction without labels too, from the tokens."""
    function = getattr(multi_token_prediction, _LOSSES, None)
    if function is None or not _layers(model):
        return False
    return model.training and "input_ids" in inspect.signature(function).parameters


def _layers(model: Any) -> int:
    return getattr(getattr(model, "config", None), "mtp_num_layers", None) or 0


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
