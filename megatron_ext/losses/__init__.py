"""Losses of policies and students from hidden states: the fused head, and the loss's few lines on what it gives.

The head takes any gradient per token, so no loss needs chunks of its own: each costs what one call of the head does.
"""

from megatron_ext.losses.distillation import DistillationLoss, TopKDistillationLoss
from megatron_ext.losses.grpo import GRPOLoss
from megatron_ext.losses.preference import DPOLoss, KTOLoss, ORPOLoss, SimPOLoss

__all__ = ["DPOLoss", "DistillationLoss", "GRPOLoss", "KTOLoss", "ORPOLoss", "SimPOLoss", "TopKDistillationLoss"]
