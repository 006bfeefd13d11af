"""`bits` of losses from hidden states: their log-probabilities are those of the head with these bits."""

import pytest
import torch

from megatron_ext import linear_log_probs
from megatron_ext.losses import DPOLoss, GRPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from tests.batch_invariant_mode import fixed_calls, switched_on
from tests.losses.problems import B, head, rows

# Loss, and what it takes beside hidden states, weight and labels.
LOSSES = {
    "GRPO": (GRPOLoss, (torch.ones(B),)),
    "DPO": (DPOLoss, ()),
    "SimPO": (SimPOLoss, ()),
    "ORPO": (ORPOLoss, ()),
    "KTO": (KTOLoss, (torch.arange(B) % 2 == 0,)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_log_probabilities_have_these_bits(name):
    (kind, more), labels = LOSSES[name], rows().labels
    hidden, weight = (x.float().requires_grad_() for x in head())
    given = {"mask": (labels != -100).float()}
    if name in ("DPO", "KTO"):
        given["reference_log_probs"] = rows().others["reference_log_probs"].float()

    def gradients(loss):
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    log_probs = linear_log_probs(hidden, weight, labels, bits="batch")
    expected = gradients(kind().from_log_probs(log_probs, *more, **given)[0])
    with fixed_calls() as calls:
        for chunk in (None, 5):
            found = gradients(kind(bits="batch", chunk_tokens=chunk)(hidden, weight, labels, *more, **given)[0])
            assert all(map(torch.equal, found, expected))
        assert len(calls) == 2
        kind()(hidden, weight, labels, *more, **given)
        assert len(calls) == 2
        with switched_on():
            assert torch.equal(kind()(hidden, weight, labels, *more, **given)[0], expected[0])
            kind(bits="fast")(hidden, weight, labels, *more, **given)
        assert len(calls) == 3
