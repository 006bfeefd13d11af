"""Losses of policies and students from hidden states: each is a few lines on the read-outs of the fused head.

The head takes any gradient per token, so no loss needs chunks of its own: each costs as much as one call of the head.
"""

from megatron_ext.losses.distillation import DistillationLoss, TopKDistillationLoss
from megatron_ext.losses.grpo import GRPOLoss
from megatron_ext.losses.preference import DPOLoss, KTOLoss, ORPOLoss, SimPOLoss

__all__ = ["DPOLoss", "DistillationLoss", "GRPOLoss", "KTOLoss", "ORPOLoss", "SimPOLoss", "TopKDistillationLoss"]
