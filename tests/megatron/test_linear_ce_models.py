"""The fused head in Megatron's other models: found by what they have, exact, and without logits in training."""

import functools
from contextlib import nullcontext

import pytest
import torch

from megatron_ext import reference
from megatron_ext.megatron import versions
from megatron_ext.megatron.fusion_report import fusion_report
from tests.gpt import grouped, model_parallel, tiny_batches, train_steps
from tests.marks import slow
from tests.megatron import language_models
from tests.megatron.patching import (
    SEQ,
    assert_fused_is_stock,
    batch,
    counting_logits,
    next_token_loss,
    on_gpt,
    patched,
    run,
)
from tests.ranks import ranks


def bert_step(model):
    ids, labels, _ = batch()
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), lm_labels=labels)[0]


def t5_step(model):
    ids, labels, _ = batch()
    every = torch.ones(2, SEQ, SEQ, dtype=torch.bool)
    return model(
        encoder_input_ids=ids,
        decoder_input_ids=ids.flip(1),
        encoder_attn_mask=~every,
        decoder_attn_mask=every.triu(1),
        encoder_decoder_attn_mask=~every,
        lm_labels=labels,
    )


def compare(model, step=next_token_loss, inside=None) -> dict:
    """Losses and gradients as stock's, which are returned, no logits in training, and a report that says so.

    `inside`: the language model in `model`, of which only that is patched then."""
    named = model if inside is None else inside
    layer = named.output_layer if hasattr(named, "output_layer") else named.lm_head.output_layer  # of T5
    with counting_logits(layer) as made:
        found = assert_fused_is_stock(model, step, patched_model=None if inside is None else model)
        assert len(made) == 1, "only stock makes logits"
        assert "forward" not in vars(named)
        step(model)
        assert len(made) == 2
    (counted,) = fusion_report().models
    assert (counted.model, counted.losses_fused, counted.logits_made.total()) == (type(named).__name__, 1, 0)
    return found


NEWER = pytest.mark.skipif(
    not versions.HYBRID_MODEL.is_there(), reason="HybridModel, and our spec of it, came with Megatron-Core 0.18"
)


@grouped(2)
@pytest.mark.parametrize(
    "build, step, options",
    [
        (language_models.tiny_hybrid, next_token_loss, {"sequence_parallel": True}),
        (language_models.tiny_bert, bert_step, {}),
        *slow((language_models.tiny_hybrid, next_token_loss, {}), (language_models.tiny_t5, t5_step, {})),
    ],
    ids=["hybrid-sequence", "bert", "hybrid", "t5"],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_other_language_models(tied, build, step, options):
    compare(build(tied=tied, **options), step)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("ours", [False, pytest.param(True, marks=NEWER)], ids=["stock", "ours"])
def test_hybrid_with_mamba_layers(ours):
    tokens, model = tiny_batches(steps=3), {"pattern": "M*M-", "ours": ours, "tied": False}
    with model_parallel(tp=2):
        step_model = language_models.tiny_hybrid(**model)
        assert any("dt_bias" in name for name, _ in step_model.named_parameters())
        compare(step_model)
    with model_parallel():
        alone = train_steps([language_models.tiny_hybrid(**model)], tokens, lr=1e-2)
    for patching in (nullcontext(), patched(chunk_size=3)):
        with model_parallel(tp=2), patching:
            losses = train_steps([language_models.tiny_hybrid(**model)], tokens, lr=1e-2)
        assert losses == pytest.approx(alone, rel=1e-5)


@on_gpt()
def test_a_loss_that_megatron_binds_once(model):
    """Newer versions bind the loss when the model is built: the fused head still takes its place."""
    model.compute_language_model_loss = functools.partial(type(model).compute_language_model_loss, model)
    own = dict(vars(model))
    compare(model)
    assert vars(model) == own


@pytest.mark.slow
@on_gpt()
def test_classes_made_after_the_patch(model):
    with patched(chunk_size=3):

        class Later(type(model)):
            def _postprocess(self, hidden_states, *args, labels=None, **kwargs):
                logits, _ = self.output_layer(hidden_states, weight=self.shared_embedding_or_output_weight())
                return self.compute_language_model_loss(labels, 2 * logits)

        model.__class__ = Later
        run(model, batch()[1])
        assert fusion_report().losses_fused == 1
    assert not hasattr(Later._postprocess, "original")


@grouped(1)
@pytest.mark.parametrize(
    "build,step",
    [
        (language_models.tiny_llava, language_models.llava_step),
        (language_models.tiny_mimo, language_models.mimo_step),
    ],
    ids=["llava", "mimo"],
)
def test_megatrons_multimodal_models(build, step):
    model = build()
    found = compare(model, step, inside=model.language_model)
    images = [grad for name, grad in found.items() if name.startswith(("vision_model", "modality_submodules"))]
    assert images
    assert all(grad.any() for grad in images)


@grouped(2)
def test_labels_of_hybrid_tokens_as_log_probs():
    model, ids = language_models.tiny_hybrid(), batch()[0]
    expected = reference.log_probs(run(model, runtime_gather_output=True)[:, :-1], ids[:, 1:])
    with patched(chunk_size=3), counting_logits(model.output_layer) as made:
        for labels in (ids, None):
            found = run(model, labels, return_logprobs_for_linear_ce_fusion=True)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
    assert not made
