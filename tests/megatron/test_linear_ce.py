"""Promises of the GPTModel patch beside its numbers: how it comes and goes, its options, its errors, its costs."""

import functools
import gc
import inspect
import tempfile
import weakref
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core import utils
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.megatron import language_model_patch
from megatron_ext.megatron.language_model_patch import settings_of
from megatron_ext.megatron.output_layer import OutputLayer, set_output_layer
from megatron_ext.model_utils import _gpt_forward_with_linear_ce_fusion
from tests.gpt import VOCAB, causal_mask, grouped, loss_and_grads, ours_everywhere, tiny_batches, tiny_gpt
from tests.marks import slow
from tests.megatron.patching import (
    SEQ,
    assert_fused_is_stock,
    assert_same,
    batch,
    counting_logits,
    grads_of,
    on_gpt,
    one_gpt,
    patch,
    patched,
    run,
    unpatch,
)
from tests.operators import Largest


def state_of_megatron():
    return list(vars(GPTModel).items()), list(vars(schedules).items())


def assert_identical(before, after):
    for old, new in zip(before, after, strict=True):
        assert [name for name, _ in old] == [name for name, _ in new]
        assert all(a is b for (_, a), (_, b) in zip(old, new, strict=True))


@grouped(1)
def test_the_class_is_restored_bit_for_bit():
    before = state_of_megatron()
    patch(chunk_size=3)
    once = state_of_megatron()
    patch(chunk_size=3)
    assert_identical(once, state_of_megatron())
    patch(chunk_size=4)
    unpatch()
    assert_identical(before, state_of_megatron())
    unpatch()
    assert_identical(before, state_of_megatron())


@on_gpt()
def test_a_model_is_restored_bit_for_bit(model):
    before, own = state_of_megatron(), dict(vars(model))
    patch(chunk_size=3, model=model)
    run(model, batch()[1])
    patch(chunk_size=5, model=[model])
    unpatch(model=model)
    assert_identical(before, state_of_megatron())
    assert vars(model) == own


@on_gpt()
@pytest.mark.parametrize("of", ["class", "model"])
def test_unpatch_leaves_a_users_wrapper_in_its_place(model, of):
    calls = []
    owner = type(model) if of == "class" else model
    stock, megatrons_own = run(model, batch()[1]), owner.forward
    patch(chunk_size=3, model=None if of == "class" else model)
    inner = owner.forward

    @functools.wraps(inner)
    def theirs(*args, **kwargs):
        calls.append(1)
        return 2 * inner(*args, **kwargs)

    with mock.patch.object(owner, "forward", theirs):
        patch(chunk_size=4, model=None if of == "class" else model)
        assert owner.forward is theirs
        assert settings_of(model, "forward").nemo_rl_chunk_size == 4
        with counting_logits(model.output_layer) as made:
            torch.testing.assert_close(run(model, batch()[1]), 2 * stock, rtol=1e-6, atol=1e-6)
        assert not made
        unpatch(model=None if of == "class" else model)
        assert owner.forward is theirs
        assert "return_logprobs_for_linear_ce_fusion" not in inspect.signature(theirs).parameters
        with counting_logits(model.output_layer) as made:
            assert torch.equal(run(model, batch()[1]), 2 * stock)
        assert made
        assert len(calls) == 2
        if of == "class":
            with patched():
                torch.testing.assert_close(run(model, batch()[1]), 2 * stock, rtol=1e-6, atol=1e-6)
            assert owner.forward is theirs
    if of == "class":
        owner.forward = megatrons_own  # the wrapper that passes on has stayed beneath theirs


@on_gpt()
def test_the_patch_survives_an_exception_inside(model):
    with patched():
        own, layer = dict(vars(model)), dict(vars(model.output_layer))
        with pytest.raises(ValueError, match="label"):
            run(model, batch()[1] + VOCAB)
        assert vars(model) == own
        assert vars(model.output_layer) == layer


def forward_collectives(model) -> int:
    with torch.no_grad():
        run(model, batch()[1])  # ranks agree that it is fused
        with count_collectives() as counts:
            run(model, batch()[1])
    return counts.total()


@grouped(2)
def test_models_with_different_settings_live_side_by_side():
    stock, own, classwide = one_gpt(), one_gpt(), one_gpt()
    losses = [run(stock, batch()[1])]
    plain = forward_collectives(stock)
    patch(chunk_size=3, cache=0.5, model=DistributedDataParallel(own.config, DistributedDataParallelConfig(), own))
    losses += [run(own, batch()[1]), run(classwide, batch()[1])]
    fused = forward_collectives(own)
    assert fused == plain - 2  # Megatron's loss takes three, the fused head one
    assert forward_collectives(classwide) == plain
    with patched(chunk_size=2, cache=1):
        of_both = (settings_of(model, "_postprocess") for model in (own, classwide))
        assert [(one.nemo_rl_chunk_size, one.cache) for one in of_both] == [(3, 0.5), (2, 1)]
        losses += [run(own, batch()[1]), run(classwide, batch()[1])]
        assert forward_collectives(classwide) == forward_collectives(own) == fused
    assert forward_collectives(classwide) == plain
    assert forward_collectives(own) == fused
    unpatch(model=own)
    assert forward_collectives(own) == plain
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@grouped(2)
def test_the_patched_forward_is_a_function_too():
    ids, labels, positions = batch()
    model = one_gpt()
    stock = run(model, labels)
    before, own = state_of_megatron(), dict(vars(model))
    _gpt_forward_with_linear_ce_fusion(model, ids, positions, causal_mask(SEQ), labels=labels)  # ranks agree
    with count_collectives() as counts, torch.no_grad():
        loss = _gpt_forward_with_linear_ce_fusion(model, ids, positions, causal_mask(SEQ), labels=labels)
    torch.testing.assert_close(loss, stock, rtol=1e-6, atol=1e-6)
    assert counts.total() == forward_collectives(model) - 2
    assert_identical(before, state_of_megatron())
    assert vars(model) == own


def test_that_function_passes_on_all_it_is_given():
    given = {name: object() for name in inspect.signature(_gpt_forward_with_linear_ce_fusion).parameters}
    with mock.patch.object(language_model_patch, "forward_with_fused_head") as forward:
        _gpt_forward_with_linear_ce_fusion(**given)
    assert len(given) == 15
    first = [given.pop(name) for name in ("self", "input_ids", "position_ids", "attention_mask")]
    assert forward.call_args == mock.call(*first, **given)


@grouped(2)
@pytest.mark.parametrize("sequence_parallel", [True, *slow(False)], ids=["sequence", "replicated"])
def test_without_labels_nothing_changes(sequence_parallel):
    with torch.no_grad():
        model = one_gpt(sequence_parallel=sequence_parallel)
        stock = [run(model), run(model, runtime_gather_output=True)]
        with patched():
            ours = [run(model), run(model, runtime_gather_output=True)]
        assert all(map(torch.equal, ours, stock))
        assert ours[1].shape == (2, SEQ, VOCAB)


@grouped(1)
def test_inference_gives_logits():
    with torch.no_grad():
        model = one_gpt(num_attention_heads=2).eval()
        ids, _, positions = batch(1)
        logits = []
        for around in (patched, nullcontext):
            with around():
                context = StaticInferenceContext(max_batch_size=1, max_sequence_length=SEQ)
                logits.append(
                    model(ids, positions, causal_mask(SEQ), inference_context=context, runtime_gather_output=True)
                )
        assert torch.equal(*logits)


@on_gpt(tp=2, tied=False)
def test_masked_labels_give_nothing(model):
    with patched(chunk_size=3):
        labels = batch()[1].clone()
        labels[0, :5] = -100
        losses = run(model, labels)
        assert not losses[0, :5].any()
        assert losses[1].all()
        grads = grads_of(model, losses, labels == -100)
        assert not any(grad.any() for grad in grads.values() if grad is not None)


@on_gpt(tp=2, tied=True)
def test_bias_and_softcap_of_the_output_layer(model):
    plain = run(model, batch()[1])
    set_output_layer(model, ModuleSpec(OutputLayer, params={"bias": True, "softcap": 0.5}))
    torch.nn.init.normal_(model.output_layer.bias)
    with torch.no_grad():
        assert run(model).abs().max() <= 0.5
    assert (run(model, batch()[1]) - plain).abs().max() > 1e-3
    assert assert_fused_is_stock(model)["output_layer.bias"].any()
    for softcap in (0, -1.0):
        with pytest.raises(ValueError, match="softcap is"):
            set_output_layer(model, ModuleSpec(OutputLayer, params={"softcap": softcap}))


@grouped(2, over="pp")
def test_gradients_go_into_main_grad_and_none_is_deferred():
    tokens = tiny_batches()[0]
    fusion = {"gradient_accumulation_fusion": True, "defer_embedding_wgrad_compute": True}
    stock_loss, stock = loss_and_grads(tiny_gpt(tied=False), tokens)
    with ours_everywhere(), patched(chunk_size=3):
        fused_loss, fused = loss_and_grads(tiny_gpt(tied=False, **fusion), tokens)
    assert fused_loss == pytest.approx(stock_loss, rel=1e-6)
    assert_same(fused, stock)


@grouped(1)
def test_megatron_drains_what_was_deferred_and_nothing_else():
    """Megatron's own function fails where there is nothing to compute, and the fused head defers nothing."""
    stock, calls = utils.drain_embedding_wgrad_compute, []
    try:
        with patched():
            # As substitution does it, before the patch or after.
            utils.drain_embedding_wgrad_compute = record = lambda *arguments: calls.append(arguments)
            schedules.drain_embedding_wgrad_compute("config", [], [], "weight", "group")
            schedules.drain_embedding_wgrad_compute("config", ["input"], ["grad"], "weight", "group")
        assert schedules.drain_embedding_wgrad_compute is record
    finally:
        utils.drain_embedding_wgrad_compute = schedules.drain_embedding_wgrad_compute = stock
    assert calls == [("config", ["input"], ["grad"], "weight", "group")]


@grouped(1)
def test_deferred_gradients_stay_guarded_after_the_substitution():
    try:
        with ours_everywhere():
            patch()
        schedules.drain_embedding_wgrad_compute("config", [], [], "weight", "group")
    finally:
        unpatch()
    assert schedules.drain_embedding_wgrad_compute.__module__ == "megatron.core.utils"


@grouped(1)
def test_wrapped_functions_go_with_the_last_patched_model():
    stock = schedules.forward_step_calc_loss, schedules.drain_embedding_wgrad_compute
    first, last = one_gpt(), one_gpt()
    for _ in range(2):
        patch(model=[first, last])
    ends = [end.peek() for end in list(weakref.finalize._registry)]
    assert sum(end is not None and end[0] is first for end in ends) == 1
    del ends
    del first
    gc.collect()
    assert schedules.forward_step_calc_loss is not stock[0]
    del last
    gc.collect()
    assert (schedules.forward_step_calc_loss, schedules.drain_embedding_wgrad_compute) == stock


@on_gpt(tp=2, sequence_parallel=True)
def test_the_config_logger_gets_its_logits(model):
    with tempfile.TemporaryDirectory() as folder:
        stock, logits = run(model, batch()[1]), run(model)
        model.config.config_logger_dir = folder
        with patched():
            loss = run(model, batch()[1])
        torch.testing.assert_close(loss, stock, rtol=1e-6, atol=1e-6)
        (dump,) = Path(folder).glob("input_and_logits*.pth")
        logged = torch.load(dump, weights_only=False)["logits"]
        assert type(logged) is torch.Tensor
        assert torch.equal(logged, logits.transpose(0, 1))


NOT_USED = dict.fromkeys(["input_ids", "position_ids", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"])


@on_gpt(tp=2)
def test_combined_1f1b_calls_postprocess_alone(model):
    kept = []
    with model.decoder.register_forward_hook(lambda module, args, output: kept.append(output)):
        stock = run(model, batch()[1])
    with patched():
        forward_collectives(model)  # ranks agree that it is fused
        with count_collectives() as counts:
            loss = model._postprocess(
                hidden_states=kept[0].detach(),
                labels=batch()[1],
                mtp_in_postprocess=False,
                loss_mask=None,
                runtime_gather_output=None,
                **NOT_USED,
            )
    torch.testing.assert_close(loss, stock, rtol=1e-6, atol=1e-6)
    assert counts.total() == 1


@grouped(2)
@pytest.mark.parametrize("sequence_parallel", [True, *slow(False)], ids=["sequence", "replicated"])
def test_collectives_and_memory_of_the_patched_step(sequence_parallel):
    vocab_size, size = 1024, 8
    model = one_gpt(sequence_parallel=sequence_parallel, vocab_size=vocab_size, tied=False)
    hidden = torch.randn(SEQ // 2 if sequence_parallel else SEQ, size, 32, requires_grad=True)

    def step():
        labels = tiny_batches(batch=size, seq=SEQ - 1, vocab_size=vocab_size)[0]
        with count_collectives() as forward, Largest(lambda x: x.untyped_storage().nbytes() // 4) as memory:
            loss = model._postprocess(hidden, labels=labels, **NOT_USED)
        with count_collectives() as backward, memory:
            loss.sum().backward()
        return forward.total(), backward.total(), memory.size

    logits = SEQ * size * vocab_size // 2
    gathers = int(sequence_parallel)
    assert step() == (3 + gathers, 1 + gathers, logits)
    with patched(chunk_size=1, cache=0):
        step()
        model.output_layer.weight.grad = hidden.grad = None
        forward, backward, largest = step()
    assert (forward, backward) == (1 + gathers, 1 + gathers)
    assert largest == model.output_layer.weight.numel() == logits // 2  # its gradient; no logits
