"""Losses from hidden states cost what their one call of the head does: FLOPs, bytes, collectives; on fake tensors."""

from functools import partial

import pytest
import torch

from benchmarks.meter import measure, one_rank_of
from megatron_ext import linear_log_probs
from megatron_ext.losses import DistillationLoss, DPOLoss, GRPOLoss, KTOLoss, ORPOLoss, SimPOLoss, TopKDistillationLoss
from tests.marks import quick_if

# One rank of 4 with 16 rows of 512 tokens in bf16. The numbers of a token that a loss makes beside the head's.
B, S, D, V, R = 16, 128, 256, 32768, 4
TOKEN_BYTES = 68


def cost(call):
    """Measure `call(hidden, weight, labels, group)`, which runs forward and backward."""
    with one_rank_of(R) as group:
        hidden = torch.empty(B, S, D, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(V // R, D, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(B, S, dtype=torch.int64)
        with measure() as found:
            call(hidden, weight, labels, group)
        return found


def alone(hidden, weight, labels, group):
    linear_log_probs(hidden, weight, labels, group, cache=1).backward(torch.ones(B, S))


# Options of each loss, and what it takes of each token.
OF_LOG_PROBS = {
    "GRPO": (GRPOLoss, {"beta": 0.1}, ("old_log_probs", "reference_log_probs", "sampling_log_probs")),
    "GSPO": (GRPOLoss, {"loss_type": "grpo", "importance_sampling_level": "sequence"}, ("old_log_probs",)),
    "DPO": (DPOLoss, {"sft_weight": 0.1}, ("reference_log_probs",)),
    "SimPO": (SimPOLoss, {}, ()),
    "ORPO": (ORPOLoss, {}, ()),
    "KTO": (KTOLoss, {}, ("reference_log_probs",)),
}


def of_log_probs(name, head, mask, options):
    """Call the loss `name` with `head`, which is hidden states, weight and labels."""
    kind, own, per_token = OF_LOG_PROBS[name]
    of_rows = {GRPOLoss: [torch.zeros(len(mask))], KTOLoss: [torch.ones(len(mask)).bool()]}.get(kind, [])
    return kind(cache=1, **own, **options)(*head, *of_rows, mask=mask, **dict.fromkeys(per_token, mask))


@pytest.mark.parametrize("name", quick_if(("GRPO", "DPO").__contains__, OF_LOG_PROBS))
def test_no_more_than_the_head(name):
    head = cost(alone)
    found = cost(lambda *given: of_log_probs(name, given[:3], torch.zeros(B, S), {"tp_group": given[3]})[0].backward())
    assert found.flops == head.flops == 6 * B * S * D * V // R
    assert found.collectives == head.collectives
    assert found.collectives.total() == 2
    assert found.peak_bytes <= head.peak_bytes + TOKEN_BYTES * B * S
    assert found.peak_bytes <= 1.005 * head.peak_bytes


OF_ALL = {name: partial(of_log_probs, name) for name in OF_LOG_PROBS} | {
    "distillation": lambda head, mask, options: DistillationLoss(cache=1, **options)(*head[:2], *head[:2], mask),
    "of the teacher's top-k": lambda head, mask, options: TopKDistillationLoss(
        zero_outside_topk=True, **options
    ).with_teacher(*head[:2], *head[:2], 2, mask=mask),
    "of the student's top-k": lambda head, mask, options: TopKDistillationLoss(bucket=True, **options).with_teacher(
        *head[:2], *head[:2], 2, "student", mask
    ),
}


@pytest.mark.parametrize("name", OF_ALL)
def test_masked_tokens_make_no_product(name):
    """Products take the tokens that count, or as many as the bound says."""
    rows, length, width, columns = 4, 8, 6, 48
    hidden, weight = torch.randn(rows, length, width), torch.randn(columns, width)
    labels, mask = torch.randint(columns, (rows, length)), torch.zeros(rows, length)
    mask[:, 2:5] = 1

    def flops(skip):
        head = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(), labels]
        with measure() as found:
            OF_ALL[name](head, mask, {"skip_ignored": skip})[0].backward()
        return found.flops

    each = flops(False) // (rows * length)
    assert each >= 6 * width * columns
    assert flops(False) == each * rows * length
    assert flops(True) == each * int(mask.sum())
    assert flops(20) == each * 20
