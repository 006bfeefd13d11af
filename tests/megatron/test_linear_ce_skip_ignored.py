"""Tokens that a loss mask leaves out make no product in a patched model: all else is stock's."""

from types import MethodType

import pytest
import torch

from benchmarks.meter import measure
from tests.gpt import grouped
from tests.marks import slow
from tests.megatron.patching import SEQ, assert_same, batch, grads_of, on_gpt, one_gpt, patched, run

MASK = torch.zeros(2, SEQ)
MASK[0, 1:3] = 1
MASK[1, 5:] = 0.5
# Of the first four positions 2 count, of the last four 3, and a token that is rolled in for each row and MTP layer.
IN_A_SLICE = 7


@pytest.mark.parametrize("skip", [IN_A_SLICE, *slow(True)])
@pytest.mark.parametrize("mtp", [None, 2], ids=["plain", "mtp"])
@grouped(2)
def test_losses_and_gradients_are_stocks(mtp, skip):
    """Multi-token prediction rolls labels and mask on together; its losses count where the rolled mask does."""
    model, labels = one_gpt(mtp_num_layers=mtp, sequence_parallel=True), batch()[1]
    stock = run(model, labels, loss_mask=MASK)
    expected = grads_of(model, stock, MASK)
    with patched(skip_ignored=skip):
        loss = run(model, labels, loss_mask=MASK)
        found = grads_of(model, loss, MASK)
    torch.testing.assert_close(loss * MASK, stock * MASK, rtol=1e-6, atol=1e-6)
    assert not loss[MASK == 0].any()
    assert_same(found, expected)


@on_gpt()
def test_products_are_of_the_tokens_that_count(model, labels):
    """A bound says how many rows are multiplied, whatever counts; without one it is as many as count."""
    rows, width = model.shared_embedding_or_output_weight().shape
    flops = {}
    for skip in (False, True, 7):
        with patched(skip_ignored=skip, cache=1), measure() as found:
            run(model, labels, loss_mask=MASK).sum().backward()
        flops[skip] = found.flops
    each, counting = 6 * rows * width, int((MASK != 0).sum())
    assert flops[False] - flops[True] == each * (labels.numel() - counting)
    assert flops[7] - flops[True] == each * (7 - counting)
    with patched(skip_ignored=4), pytest.raises(ValueError, match="at_most, or skip_ignored, is 4, and more"):
        run(model, labels, loss_mask=MASK)
    with patched(skip_ignored=True), pytest.raises(ValueError, match="loss_mask has shape"):
        run(model, labels, loss_mask=MASK[:, 1:])


@on_gpt()
def test_labels_given_by_position_are_masked_too(model, labels):
    with patched(skip_ignored=True):
        expected = run(model, labels, loss_mask=MASK)
        patch, given = type(model)._postprocess, {}

        def by_position(**arguments):
            given.update(arguments)
            first = [arguments.pop(name) for name in ("hidden_states", "input_ids", "position_ids", "labels")]
            return patch(model, *first, **arguments)

        model._postprocess = by_position
        found = run(model, labels, loss_mask=MASK)
    assert given["labels"] is labels
    assert torch.equal(found, expected)


@on_gpt()
def test_log_probs_of_tokens_that_count(model):
    """Masks of log-probabilities lie as the token ids do."""
    tokens = batch()[0]
    with patched(), measure() as whole:
        expected = run(model, tokens, tokens, return_logprobs_for_linear_ce_fusion=True)
    each, counting = 2 * model.shared_embedding_or_output_weight().numel(), int((MASK[:, 1:] != 0).sum())
    for skip, multiplied in ((True, counting), (9, 9)):
        with patched(skip_ignored=skip), measure() as left:
            found = run(model, tokens, tokens, return_logprobs_for_linear_ce_fusion=True, loss_mask=MASK)
        torch.testing.assert_close(found, expected * (MASK[:, 1:] != 0), rtol=1e-6, atol=1e-6)
        assert whole.flops - left.flops == each * (tokens.numel() - multiplied)


@on_gpt()
def test_a_loss_put_on_later_is_given_the_labels_that_came(model, labels):
    """Labels are ids of the vocabulary in the first call with that loss as in all others."""
    seen = []
    own = type(model).compute_language_model_loss

    def loss(self, labels, logits):
        seen.append(int(labels.min()))
        return own(self, labels, logits)

    with patched(skip_ignored=True, proof="off"):
        for _ in range(3):
            run(model, labels, loss_mask=MASK)
            model.compute_language_model_loss = MethodType(loss, model)
    assert seen
    assert min(seen) >= 0
