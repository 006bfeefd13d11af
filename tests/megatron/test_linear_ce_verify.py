"""`verify=` of the patch: the first losses of a model by its own layer and loss, and by the head, side by side."""

from unittest import mock

import pytest
import torch

from megatron_ext.megatron.fused_loss import fusion_proof
from megatron_ext.megatron.fusion_report import fusion_report
from tests.gpt import grouped
from tests.megatron.patching import assert_same, batch, grads_of, on_gpt, one_gpt, patched, run
from tests.ranks import ranks


def step(model):
    loss = run(model, batch()[1])
    return loss, grads_of(model, loss)


@grouped(1, 2)
@pytest.mark.parametrize("in_parts", [False, True])
def test_first_losses_are_taken_both_ways(in_parts):
    tp = torch.distributed.get_world_size()
    if in_parts and tp == 1:
        return
    model = one_gpt(sequence_parallel=in_parts)
    stock, gradients = step(model)
    with patched(verify=2):
        for _ in range(3):
            loss, found = step(model)
            torch.testing.assert_close(loss, stock)
            assert_same(found, gradients)
    (report,) = fusion_report().models
    assert report.losses_fused == 3
    assert report.logits_made.total() == 0
    assert len(report.verified.stock) == len(report.verified.ours) == 2
    loss, norm = report.verified.largest
    assert loss < 1e-6
    assert norm < 1e-5
    assert report.verified.ours[0].loss == pytest.approx(stock.mean().item(), rel=1e-5)
    assert "2 losses verified, largest relative difference: loss" in str(report)


@on_gpt()
def test_another_loss_is_told_with_both_runs(model):
    own = fusion_proof.linear_training_loss

    def doubled(*arguments):
        found = own(*arguments)
        return found._replace(loss=2 * found.loss)

    with patched(verify=1), mock.patch.object(fusion_proof, "linear_training_loss", doubled):
        with pytest.warns(UserWarning, match=r"the loss of a step differs by 1\.0e\+00, and at most 1\.0e-04"):
            step(model)


@grouped(1)
def test_a_model_that_does_not_train_is_not_verified():
    model = one_gpt().eval()
    with patched(verify=1):
        run(model, batch()[1])
    assert fusion_report().models[0].verified is None


@ranks(1)
def test_number_of_losses_to_verify_has_a_rule():
    with pytest.raises(ValueError, match="verify is -1: it must be a number of losses"), patched(verify=-1):
        pass
