"""NeMo-RL's losses of a policy, by its names of losses and options, on the formulas of `megatron_ext.losses`.

A loss is called with log-probabilities and a micro-batch, and gives this micro-batch's part of the loss of the global
batch: it divides by the counts of the global batch, so that parts add up over micro-batches and data-parallel ranks to
the same loss, whatever the cut; so do the metrics, but for those with "_min" or "_max" in their names.

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
