"""Errors where stages share the vocabulary: one rank's failure is reported on all; unsupported models are refused."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext.experimental import pipeline_vocabulary
from megatron_ext.experimental.pipeline_vocabulary import multi_token_stage, paused_forward
from megatron_ext.experimental.pipeline_vocabulary.vocabulary_sharing import check_config
from megatron_ext.megatron.build_check import check_models
from megatron_ext.run import why_no_pipeline_vocabulary
from tests.batch_invariant_mode import switched_on
from tests.experimental.test_pipeline_vocabulary import MTP, VARIABLE, shared
from tests.gpt import (
    SEQUENCE,
    VOCAB,
    data_parallel,
    forward_step,
    model_parallel,
    run_schedule,
    stock_spec,
    tiny_batches,
    tiny_config,
    tiny_gpt,
)
from tests.marks import slow
from tests.ranks import ranks


def fails(kind, words, stage=1, step=forward_step, **settings):
    """A step that fails on one stage raises its error there, and on the other one an error that names it."""
    with model_parallel(pp=2), shared():
        wrapped = data_parallel(tiny_gpt(stock_spec, **settings))
        if dist.get_rank() != stage:
            kind, words = RuntimeError, f"rank {stage} failed"
        with pytest.raises(kind, match=words):
            run_schedule(wrapped, tiny_batches(batch=8)[0], step=step)


@ranks(2)
@pytest.mark.parametrize("stage", [1, *slow(0)])
@pytest.mark.parametrize(
    "micro_batch,settings",
    [(0, {}), *slow((3, MTP), (3, {**MTP, **VARIABLE}))],
    ids=["first", "mtp", "mtp-variable"],
)
def test_a_rank_that_fails_is_reported_on_all(stage, micro_batch, settings):
    calls = iter(range(100))

    def step(microbatches, model):
        call = next(calls)
        if call == micro_batch and dist.get_rank() == stage:
            raise FloatingPointError("this batch cannot be read")
        return forward(microbatches, model)

    settings = dict(settings)
    forward = settings.pop("step", forward_step)
    fails(FloatingPointError, "cannot be read", stage, step, **settings)


@pytest.mark.essential
@ranks(2)
def test_a_backward_that_fails_is_reported_on_all():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            raise FloatingPointError("this gradient cannot be had")

    def step(microbatches, model):
        output, loss = forward_step(microbatches, model)
        return output, lambda per_token: loss(Fails.apply(per_token))

    fails(FloatingPointError, "cannot be had", step=step)


@ranks(2)
def test_labels_outside_of_the_vocabulary_are_reported_on_all():
    def step(microbatches, model):
        tokens = next(microbatches).clone()
        if dist.get_rank() == 1:  # the stage that has labels
            tokens[0, 3] = VOCAB + 5
        return forward_step(iter([tokens]), model)

    with model_parallel(pp=2), shared():
        wrapped = data_parallel(tiny_gpt(stock_spec))
        with pytest.raises(ValueError, match=f"labels.*{VOCAB + 5}"):
            run_schedule(wrapped, tiny_batches(batch=8)[0], step=step)


@pytest.mark.slow
@ranks(2)
def test_other_labels_of_mtp_are_reported_on_all_ranks():
    def other(self, tensor, layers):
        return [tensor, *(tensor for _ in range(layers))]

    with mock.patch.object(multi_token_stage.ModelCall, "further_on", other):
        fails(ValueError, "token ids of a layer", mtp_num_layers=1)


def _sizes_of_the_schedule(**changed):
    """Megatron's schedule with its arguments changed on this rank alone."""
    from megatron.core.pipeline_parallel import get_forward_backward_func as real

    def with_others():
        return lambda **arguments: real()(**arguments | changed)

    return mock.patch("megatron.core.pipeline_parallel.get_forward_backward_func", with_others)


@ranks(2)
@pytest.mark.parametrize(
    "changed,named",
    [
        *slow(({"num_microbatches": 2}, "num_microbatches, the order of passes")),
        ({"micro_batch_size": 1}, "micro_batch_size"),
    ],
    ids=["micro-batches", "micro-batch-size"],
)
def test_stages_that_would_send_in_other_orders_are_told(changed, named):
    """Stages would otherwise wait for each other for ever, as where one node was started with another batch size."""
    with model_parallel(pp=2), shared():
        wrapped = data_parallel(tiny_gpt(stock_spec))
        batch = tiny_batches(batch=8)[0]
        run_schedule(wrapped, batch)
        with (
            _sizes_of_the_schedule(**(changed if dist.get_rank() == 1 else {})),
            pytest.raises(ValueError, match=f"ranks differ in {named}, so that.*call it with"),
        ):
            run_schedule(wrapped, batch)
        run_schedule(wrapped, batch)


@ranks(2)
def test_what_is_refused():
    with model_parallel(pp=2), shared():
        from megatron.core.models.bert import bert_model as bert

        with pytest.raises(ValueError, match="65 rows.*pad it to 66"):
            tiny_gpt(stock_spec, vocab_size=65)
        with pytest.raises(ValueError, match="num_microbatches_with_p.* is 1.*turn one of them off"):
            tiny_gpt(stock_spec, num_microbatches_with_partial_activation_checkpoints=1)
        for switch, config in ((nullcontext, {"batch_invariant_mode": True}), (switched_on, {})):
            with (
                switch(),
                pytest.raises(ValueError, match="batch_invariant_mode is True: .*bits.*turn one of them off"),
            ):
                check_config(SimpleNamespace(pipeline_model_parallel_size=2, **config))
        odd = mock.patch(
            "megatron_ext.megatron.fused_loss.fusion_decision.why_not_fused", return_value="its output layer is odd"
        )
        with odd, pytest.raises(ValueError, match="rank 1: .*odd" if dist.get_rank() == 0 else "GPTModel.*odd"):
            tiny_gpt(stock_spec)
        no_layers = "last pipeline stage has 0 layers of multi-token"
        with pytest.raises(ValueError, match=f"rank 1: .*{no_layers}" if dist.get_rank() == 0 else no_layers):
            tiny_gpt(stock_spec, weights="init", mtp_num_layers=1, model={"mtp_block_spec": None})
        chunks = tiny_gpt(stock_spec)
        with pytest.raises(ValueError, match="pg_collection was given"):
            pipeline_vocabulary.forward_backward(
                **dict.fromkeys(("forward_step_func", "data_iterator", "num_microbatches", "seq_length"), None),
                micro_batch_size=1,
                model=chunks,
                pg_collection=object(),
            )
        if dist.get_rank() == 0:
            tokens = tiny_batches(batch=1)[0]
            with pytest.raises(RuntimeError, match="get_forward_backward_func"):
                chunks[0](tokens[:, :-1], torch.arange(16).expand(1, 16), None)
        with pytest.raises(ValueError, match="BertModel cannot share its vocabulary.*HybridModel can"):
            bert.BertModel(tiny_config(), 2, None, VOCAB, SEQUENCE)
    with model_parallel(), shared(), pytest.raises(ValueError, match="pipeline_model_parallel_size is 1"):
        tiny_gpt(stock_spec)


@ranks(2)
def test_a_model_that_was_built_before_sharing_is_refused():
    with model_parallel(pp=2):
        wrapped, tokens = data_parallel(tiny_gpt(stock_spec)), tiny_batches(batch=8)[0]
        with shared():
            with pytest.raises(ValueError, match="this GPTModel was built before share_vocabulary.*--pipeline-vocab"):
                run_schedule(wrapped, tokens)
            evaluated = run_schedule(wrapped, tokens, forward_only=True)  # as a reference is, whose weights stay
        torch.testing.assert_close(evaluated, run_schedule(wrapped, tokens, forward_only=True))


@ranks(2)
def test_a_check_knows_the_shared_vocabulary():
    with model_parallel(pp=2), shared():
        found = check_models(tiny_gpt(stock_spec))
        assert found.passed
        last = dist.get_rank() == 1
        assert ("fused, 1 loss of each micro-batch without logits, the vocabulary shared over" in str(found)) == last


def test_what_is_missing_is_named(monkeypatch):
    assert why_no_pipeline_vocabulary() is None
    monkeypatch.setattr(paused_forward, "greenlet", None)
    with pytest.raises(RuntimeError, match="pip install greenlet"):
        pipeline_vocabulary.share_vocabulary()
    assert "pip install greenlet" in why_no_pipeline_vocabulary()
