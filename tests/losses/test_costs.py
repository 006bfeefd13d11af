"""Losses from hidden states cost what their one call of the head does: FLOPs, bytes, collectives; on fake tensors."""

import pytest
import torch

from benchmarks.meter import measure, one_rank_of
from megatron_ext import linear_log_probs
from megatron_ext.losses import DPOLoss, GRPOLoss, KTOLoss, ORPOLoss, SimPOLoss

# One rank of 4 with 16 rows of 512 tokens in bf16. The numbers of a token that a loss makes beside the head's.
B, S, D, V, R = 16, 128, 256, 32768, 4
TOKEN_BYTES = 80


def cost(call):
    """Of forward and backward of `call(hidden, weight, labels, group)`, a scalar or a tensor with its gradient."""
    with one_rank_of(R) as group:
        hidden = torch.empty(B, S, D, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(V // R, D, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(B, S, dtype=torch.int64)
        with measure() as found:
            call(hidden, weight, labels, group)
        return found


def alone(hidden, weight, labels, group):
    linear_log_probs(hidden, weight, labels, group, cache=1).backward(torch.ones(B, S))


def per_token(*names):
    return {name: torch.zeros(B, S) for name in names}


CALLS = {
    "GRPO": lambda *head: GRPOLoss(beta=0.1, tp_group=head[3], cache=1)(
        *head[:3],
        torch.zeros(B),
        **per_token("mask", "old_log_probs", "reference_log_probs", "sampling_log_probs"),
    ),
    "GSPO": lambda *head: GRPOLoss(loss_type="grpo", importance_sampling_level="sequence", tp_group=head[3], cache=1)(
        *head[:3], torch.zeros(B), **per_token("mask", "old_log_probs")
    ),
    "DPO": lambda *head: DPOLoss(sft_weight=0.1, tp_group=head[3], cache=1)(
        *head[:3], **per_token("mask", "reference_log_probs")
    ),
    "SimPO": lambda *head: SimPOLoss(tp_group=head[3], cache=1)(*head[:3]),
    "ORPO": lambda *head: ORPOLoss(tp_group=head[3], cache=1)(*head[:3]),
    "KTO": lambda *head: KTOLoss(tp_group=head[3], cache=1)(
        *head[:3], torch.ones(B).bool(), **per_token("reference_log_probs")
    ),
}


QUICK = ("GRPO", "DPO")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]
)
def test_no_more_than_the_head(name):
    head, found = cost(alone), cost(lambda *call: CALLS[name](*call)[0].backward())
    assert found.flops == head.flops == 6 * B * S * D * V // R
    assert found.collectives == head.collectives
    assert found.collectives.total() == 2
    assert found.peak_bytes <= head.peak_bytes + TOKEN_BYTES * B * S
    assert found.peak_bytes <= 1.005 * head.peak_bytes
