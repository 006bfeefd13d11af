"""NeMo-RL's policy losses, under NeMo-RL's names of losses and options, on the formulas of `megatron_ext.losses`.

A loss is called with log-probabilities and a micro-batch. It divides by the counts of the global batch: its values add
up, over micro-batches and data-parallel ranks, to the loss of the global batch, however that is cut. Metrics add up
too, except those with "_min" or "_max" in their names.

Legend: B rows, S positions, P pairs, K ids per token. `x_BS[:, t]` belongs to token t; t = 0, which nothing predicts,
never counts. `token_mask` `[B, S]` says which tokens count, `sample_mask` `[B]` which rows.
"""

from megatron_ext.policy.losses.clipped_policy_gradient import ClippedPGLoss
from megatron_ext.policy.losses.formulas import DistillationLossFn, DPOLossFn, NLLLoss
from megatron_ext.policy.losses.worker_protocol import (
    LossFunction,
    LossInputType,
    LossType,
    MetricNormalizer,
    valid_counts,
)

__all__ = [
    "ClippedPGLoss",
    "DPOLossFn",
    "DistillationLossFn",
    "LossFunction",
    "LossInputType",
    "LossType",
    "MetricNormalizer",
    "NLLLoss",
    "valid_counts",
]
