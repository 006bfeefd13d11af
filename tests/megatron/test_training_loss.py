"""The loss of a training step with what is logged beside it, from one pass."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.head import LmHead
from megatron_ext.megatron.fused_loss.training_loss import linear_training_loss


@pytest.mark.parametrize("options", [{}, {"skip_ignored": True}, {"skip_ignored": 9, "hits": True}], ids=str)
def test_entropy_beside_a_loss_has_no_gradient(options):
    """The entropy is 0 at tokens that do not count, and the loss has the gradients that it has alone."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 2, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    labels = torch.randint(11, (5, 2))
    labels[0, 0] = labels[3, 1] = -100
    logits = hidden @ weight.t()
    expected = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    entropy = torch.distributions.Categorical(logits=logits.detach()).entropy() * (labels != -100)
    found = linear_training_loss(LmHead(weight), hidden, labels, entropy=True, **options)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-5, atol=1e-6)
    assert not found.entropy.requires_grad
    assert (found.hits is None) == ("hits" not in options)
    gradients = [torch.autograd.grad(loss.sum(), [hidden, weight]) for loss in (found.loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
