"""`return_logprobs_for_linear_ce_fusion`: token ids in, log-probabilities of next tokens out."""

import inspect

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_ext import reference
from megatron_ext.megatron.layer_specs import gpt_block_spec
from megatron_ext.megatron.output_processors import NextTokenLogProbs
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from tests.gpt import VOCAB, causal_mask, grouped, model_parallel, tiny_batches, tiny_gpt
from tests.marks import slow
from tests.megatron.patching import SEQ, assert_same, batch, grads_of, on_gpt, one_gpt, packing, patched, run
from tests.ranks import ranks

ASKED = {"return_logprobs_for_linear_ce_fusion": True}


def expected(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """Log-probabilities [B, S - 1] of each next token."""
    return reference.log_probs(logits_BSV[:, :-1], tokens_BS[:, 1:])


@grouped(1, 2)
@pytest.mark.parametrize("sequence_parallel", [True, *slow(False)], ids=["sequence", "replicated"])
def test_values_and_gradients(sequence_parallel):
    world_size = dist.get_world_size()
    model, ids = one_gpt(sequence_parallel=sequence_parallel and world_size > 1), batch()[0]
    log_probs = expected(run(model, runtime_gather_output=True), ids)
    weights = torch.rand_like(log_probs)
    # The reference gathers full logits on every rank, each of which gives their whole gradient: one is enough.
    stock = grads_of(model, log_probs, weights)
    with patched(chunk_size=3):
        ours = run(model, ids, **ASKED)
        fused = grads_of(model, ours, weights)
    assert ours.shape == (2, SEQ - 1)
    torch.testing.assert_close(ours, log_probs, rtol=1e-6, atol=2e-6)
    assert_same(fused, stock)


@on_gpt()
def test_false_takes_shifted_labels(model):
    with patched():
        _, labels, _ = batch()
        losses = run(model, labels, return_logprobs_for_linear_ce_fusion=False)
        assert losses.shape == (2, SEQ)
        assert torch.equal(losses, run(model, labels))
        option = inspect.signature(type(model).forward).parameters["return_logprobs_for_linear_ce_fusion"]
        assert option.default is False


def our_gpt(**overrides):
    return tiny_gpt(gpt_block_spec, **overrides)[0]


def packed_log_probs(model, tokens, params, borders, **kwargs):
    """Ours; and what they must be: from the logits, 0 where a document ends."""
    positions = torch.arange(tokens.shape[1])[None]
    logits = model(tokens, positions, None, packed_seq_params=params, runtime_gather_output=True)
    wanted = expected(logits, tokens)
    wanted = wanted.where(~torch.isin(torch.arange(wanted.shape[1]), torch.tensor(borders)), 0.0)
    with patched(chunk_size=3):
        return model(tokens, positions, None, labels=tokens, packed_seq_params=params, **ASKED), wanted


@grouped(2)
def test_packed_documents_do_not_see_each_other():
    tokens = tiny_batches(batch=1, seq=11)[0]
    model = our_gpt(sequence_parallel=True)
    ours, wanted = packed_log_probs(model, tokens, packing(0, 3, 4, 12), [2, 3])
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=2e-6)
    weights = torch.rand_like(ours)
    assert_same(grads_of(model, ours, weights), grads_of(model, wanted, weights))
    # Two documents of 3 and 5 tokens, in 4 and 8 places.
    ours, wanted = packed_log_probs(model, tokens, packing(0, 3, 8, padded=(0, 4, 12)), [2, 3, 8, 9, 10])
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=2e-6)


@grouped(1)
def test_a_forward_that_takes_labels_and_borders_in_kwargs():
    tokens, positions = tiny_batches(batch=1, seq=11)[0], torch.arange(12)[None]

    class Passing(GPTModel):
        def forward(self, input_ids, position_ids, attention_mask, **kwargs):
            return super().forward(input_ids, position_ids, attention_mask, **kwargs)

    model, params = our_gpt(), packing(0, 3, 4, 12)
    model.__class__ = Passing
    ours, wanted = packed_log_probs(model, tokens, params, [2, 3])
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=2e-6)
    with patched():
        given = {"packed_seq_params": params, "output_processor": NextTokenLogProbs()}
        torch.testing.assert_close(model(tokens, positions, None, **given), wanted, rtol=1e-6, atol=2e-6)


@ranks(2)
@pytest.mark.parametrize("packed", [True, *slow(False)], ids=["packed", "whole"])
def test_context_parallel(packed):
    starts = (0, 4, 16) if packed else (0, 16)
    tokens = tiny_batches(batch=1, seq=15)[0]
    positions = torch.arange(16)[None]
    weights = torch.rand(1, 15)
    with model_parallel(cp=1):
        alone = our_gpt()
        logits = alone(tokens, positions, None, packed_seq_params=packing(*starts))
        wanted = expected(logits, tokens)
        wanted = wanted.where(torch.arange(15) != 3, 0.0) if packed else wanted
        stock = grads_of(alone, wanted, weights)
    with model_parallel(cp=2):
        cu_seqlens = torch.tensor(starts, dtype=torch.int32) if packed else None
        parts = SequenceParts(parallel_state.get_context_parallel_group(), cu_seqlens)
        extra = {"packed_seq_params": packing(*starts)} if packed else {}
        model = our_gpt()
        own, own_positions = parts.split(tokens, 1), parts.split(positions, 1)
        for labels in (own, tokens):
            with patched(chunk_size=3):
                ours = model(own, own_positions, None, labels=labels, **extra, **ASKED)
            torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=2e-6)
            mask = (torch.arange(16)[None] % 7 != 2).float()
            for given in (mask, parts.split(mask, 1)):
                with patched(skip_ignored=True):
                    masked = model(own, own_positions, None, labels=labels, loss_mask=given, **extra, **ASKED)
                torch.testing.assert_close(masked, wanted * mask[:, 1:], rtol=1e-6, atol=2e-6)
            grads = grads_of(model, ours, weights / 2)  # both ranks take the loss of the whole sequence
            for grad in grads.values():
                dist.all_reduce(grad)
            assert_same(grads, stock)
        with pytest.raises(ValueError, match="or of all 2 parts"), patched():
            model(own, own_positions, None, labels=tokens[:, :-1], **extra, **ASKED)


@grouped(2, over="cp")
@pytest.mark.parametrize("layers", [0, 2], ids=["main", "and multi-token prediction"])
def test_a_label_that_one_context_parallel_rank_holds(layers):
    """Refusals reach the other rank where the log-probabilities are joined."""
    tokens = tiny_batches(batch=1, seq=15)[0]
    wrong = tokens.clone()
    wrong[0, 15] = VOCAB  # the label of position 14, of rank 0's part
    with patched():
        parts = SequenceParts(parallel_state.get_context_parallel_group())
        model = our_gpt(mtp_num_layers=layers) if layers else our_gpt()
        own, positions = parts.split(tokens, 1), parts.split(torch.arange(16)[None], 1)
        said = "another rank of cp_group refused" if dist.get_rank() else "labels holds"
        for labels in (wrong, parts.split(wrong, 1)):
            with pytest.raises(ValueError, match=said):
                model(own, positions, None, labels=labels, **ASKED)
        assert model(own, positions, None, labels=tokens, **ASKED).shape == (1, 15)  # both are still here


@on_gpt(tp=2, mtp_num_layers=1)
@pytest.mark.parametrize("masked", [True, *slow(False)], ids=["masked", "all"])
def test_multi_token_prediction_predicts_the_same_tokens(model, masked):
    """Results are those of Megatron called with shifted labels and the mask that belongs to them."""
    ids = batch()[0]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0 if masked else 1
    labels, label_mask = ids.roll(-1, 1), mask.roll(-1, 1)
    label_mask[:, -1] = 0
    weights = torch.rand(2, SEQ)
    weights[:, -1] = 0
    stock = grads_of(model, run(model, labels, loss_mask=label_mask), weights)
    with patched(chunk_size=3):
        log_probs = run(model, ids, loss_mask=mask if masked else None, **ASKED)
        fused = grads_of(model, log_probs, -weights[:, :-1])
    assert_same(fused, stock)


@on_gpt(tp=2, model={"post_process": False})
def test_other_stages_pass_hidden_states_on(model):
    with patched():
        hidden = run(model)
        assert hidden.shape == (SEQ, 2, 32)
        assert torch.equal(run(model, batch()[1]), hidden)
        assert torch.equal(run(model, batch()[0], **ASKED), hidden)
        assert torch.equal(run(model, **ASKED), hidden)


@on_gpt(tp=2)
def test_wrong_labels(model):
    with patched():
        ids = batch()[0]
        with pytest.raises(
            ValueError, match="labels and input_ids are None: .* pass the token ids, not shifted, as labels=input_ids"
        ):
            model(None, batch()[2], causal_mask(SEQ), decoder_input=torch.zeros(SEQ, 2, 32), **ASKED)
        assert torch.equal(run(model, **ASKED), run(model, ids, **ASKED))
        for wrong in (ids[:, 1:], ids[0]):
            with pytest.raises(ValueError, match=f"labels have shape \\({wrong.shape[0]},.*must be token ids"):
                run(model, wrong, **ASKED)
        with pytest.raises(ValueError, match="label"):
            run(model, ids + VOCAB, **ASKED)
        assert run(model, ids, **ASKED).shape == (2, SEQ - 1)  # every rank is still here
