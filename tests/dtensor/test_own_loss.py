"""Back from `use_fused_loss`, and what a model says of its losses."""

import os
import warnings
from unittest import mock

import peft
import pytest
import torch
from torch.distributed.fsdp import fully_shard

from megatron_ext import fused_loss_report, restore_own_loss, use_fused_loss
from megatron_ext.dtensor import causal_lm_log_probs, causal_lm_loss
from tests.dtensor.models import (
    VOCAB,
    batch,
    check_gradients,
    check_step,
    drawn,
    loss_and_gradients,
    make,
    meshes,
    parallelize,
)
from tests.operators import Largest
from tests.ranks import ranks

NOT_CALLED = (
    "LlamaForCausalLM: use_fused_loss was not called, so a call with labels makes logits; causal_lm_loss and "
    "log-probabilities are computed from hidden states"
)


def test_own_loss_and_class_are_back():
    model = make("llama")
    kind, given = type(model), batch()
    expected, true = loss_and_gradients(model, **given)
    use_fused_loss(model)
    assert model(**given).logits is None
    assert restore_own_loss(model) is model
    assert type(model) is kind
    found = model(**given)
    assert found.logits is not None
    check_step(model, found.loss, expected, true, tolerance=0.0)
    assert use_fused_loss(model)(**given).logits is None  # again
    restore_own_loss(restore_own_loss(model))


class Engine(torch.nn.Module):
    """Hands on what it is asked for, as FSDP1's wrapper and DeepSpeed's."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def test_a_wrapped_model_is_restored_or_refused():
    model, given = use_fused_loss(make("llama")), batch()
    model(**given)
    assert str(fused_loss_report(torch.compile(model))) == str(fused_loss_report(model))
    with pytest.raises(ValueError, match="model is DataParallel: it must be a causal language model"):
        restore_own_loss(torch.nn.DataParallel(model))
    for asked in (restore_own_loss, fused_loss_report):
        with pytest.raises(ValueError, match="model is Engine around a Llama.* pass the model inside, model.module$"):
            asked(Engine(model))
    assert model(**given).logits is None
    restore_own_loss(torch.compile(model))
    assert model(**given).logits is not None


def test_forward_of_the_instance_is_kept():
    """Accelerate puts such a forward on a model."""
    model = make("llama")
    own, calls = model.forward, []
    model.forward = lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs)
    restore_own_loss(use_fused_loss(model))
    assert model(**batch()).logits is not None
    assert calls


@ranks(2)
def test_models_of_fsdp_and_of_parallelize_are_restored():
    model = use_fused_loss(make("llama"))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert model(**batch()).logits is None
    assert restore_own_loss(model)(**batch()).logits is not None

    tokens, model = drawn(2, 8), parallelize(make("llama"), *meshes(tp=2))
    fused = causal_lm_loss(model, tokens)
    assert str(fused_loss_report(model)) == NOT_CALLED
    with Largest(lambda x: x.numel()) as largest, pytest.warns(UserWarning, match="restore_own_loss was called"):
        own = causal_lm_loss(restore_own_loss(model), tokens)
    assert largest.size >= tokens.numel() * VOCAB // 2
    torch.testing.assert_close(own, fused, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wrap", ["the model", "the head too", "PEFT's model"])
@ranks(1, 2)
def test_report_under_fsdp2_says_what_calls_did(wrap):
    """The lm head is sharded between calls, and whole from forward to backward."""
    inside = model = make("llama")
    if wrap == "PEFT's model":
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    for layer in inside.model.layers:
        fully_shard(layer)
    if wrap == "the head too":
        fully_shard(inside.lm_head)
    use_fused_loss(fully_shard(model))
    assert str(fused_loss_report(model)) == "LlamaForCausalLM: use_fused_loss was called, and no loss was fused yet"
    found = model(**batch())
    assert found.logits is None
    assert "LlamaForCausalLM: fused (proved on " in str(fused_loss_report(model))
    found.loss.backward()
    assert "LlamaForCausalLM: fused (proved on " in str(fused_loss_report(model))


@ranks(1, 2)
def test_losses_of_a_model_that_fsdp2_wraps_come_through_logits():
    model, tokens = fully_shard(make("llama")), drawn(2, 8)
    with pytest.warns(UserWarning, match="FSDP2 gathers its weights in its own forward alone: call use_fused_loss"):
        found = causal_lm_loss(model, tokens)
    torch.testing.assert_close(found, causal_lm_loss(make("llama"), tokens))
    assert "its logits are made, FSDP2 gathers its weights" in str(fused_loss_report(model))


def test_report_says_what_a_model_does():
    model = make("llama")
    assert str(fused_loss_report(model)) == NOT_CALLED
    use_fused_loss(model)
    assert str(fused_loss_report(model)) == "LlamaForCausalLM: use_fused_loss was called, and no loss was fused yet"
    with warnings.catch_warnings(action="ignore"):
        model.train()(input_ids=batch()["input_ids"])
    assert str(fused_loss_report(model)).endswith("calls in training without labels, which made logits: 1")
    model(**batch())
    found = fused_loss_report(model)
    assert str(found).startswith("LlamaForCausalLM: fused (proved on ")
    assert found.proofs[0].fused
    with mock.patch.dict(os.environ, MEGATRON_EXT_FUSION="off"):
        assert "its logits are made, MEGATRON_EXT_FUSION=off is set" in str(fused_loss_report(model))
    restore_own_loss(model)
    assert str(fused_loss_report(model)) == NOT_CALLED


def test_a_restored_model_is_scored_without_logits():
    model, tokens = restore_own_loss(use_fused_loss(make("llama"))), drawn(8, 16)
    with Largest(lambda x: x.untyped_storage().nbytes() // 4) as largest, warnings.catch_warnings(action="error"):
        found = causal_lm_log_probs(model, tokens, cache=0, chunk_tokens=4)
    assert largest.size < tokens.numel() * VOCAB
    expected = model(input_ids=tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found[:, :-1], expected)


def test_a_model_in_fp64_is_fused():
    """The loss of transformers rounds logits to fp32, by more than fp64 differs from itself."""
    model, given = make("llama").double(), batch()
    expected, true = loss_and_gradients(model, **given)
    found = use_fused_loss(model)(**given)
    assert found.logits is None
    torch.testing.assert_close(found.loss.to(expected.dtype), expected, rtol=1e-6, atol=0)
    found.loss.backward()
    check_gradients(model, true)


def test_a_head_that_accelerate_moves_keeps_its_logits():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = make("llama")
    expected = model(**batch()).loss
    weights = {name: x.data for name, x in model.lm_head.named_parameters()}
    add_hook_to_module(model.lm_head, AlignDevicesHook(execution_device="cpu", offload=True, weights_map=weights))
    found = use_fused_loss(model)(**batch())
    torch.testing.assert_close(found.loss, expected)
    assert found.logits is not None


def test_report_says_why_a_head_cannot_be_fused():
    model = use_fused_loss(make("llama"))
    torch.nn.utils.parametrizations.spectral_norm(model.lm_head)
    assert "its logits are made, its lm head has a parametrization with buffers" in str(fused_loss_report(model))
