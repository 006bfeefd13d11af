"""Megatron's `batch_invariant_mode`: the fused head takes "batch" by itself; other bits where they are asked for."""

import os
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from megatron_ext import batch_invariant_mode, linear_cross_entropy, linear_log_probs, model_utils
from megatron_ext.head import LmHead, checks
from megatron_ext.integrations import trl, verl
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.layer_specs import gpt_layer_spec
from megatron_ext.megatron.output_processors import NextTokenLogProbs
from megatron_ext.numerics import batch_invariance
from tests.batch_invariant_mode import fixed_calls, switch, switched_on
from tests.gpt import causal_mask, grouped
from tests.megatron.patching import SEQ, batch, on_gpt, one_gpt, patched, run


@on_gpt()
@pytest.mark.parametrize("by", ["config", "global switch"])
def test_the_fused_head_takes_batch_and_says_so(model, by):
    with patched(), fixed_calls() as calls:
        (tokens, labels, _), seen = batch(), []
        model.decoder.register_forward_hook(lambda module, inputs, found: seen.append(found.detach()))
        run(model, labels, tokens)
        assert not calls, "off"
        model.config.batch_invariant_mode = by == "config"
        said = 'batch_invariant_mode is on: the fused head takes bits="batch"'
        with switch(by == "global switch"), pytest.warns(UserWarning, match=said):
            loss = run(model, labels, tokens)
        assert len(calls) == 1
        weight = model.shared_embedding_or_output_weight().detach()
        alone = [
            linear_cross_entropy(seen[-1][i, j], weight, labels[j, i], bits="batch")
            for j in range(labels.shape[0])
            for i in range(labels.shape[1])
        ]
        assert torch.equal(loss.detach().flatten(), torch.stack(alone))


@on_gpt()
def test_bits_are_an_option_of_patch_and_output_processors(model):
    """Options that are given go before the batch-invariant mode."""
    with fixed_calls() as calls:
        tokens, labels, _ = batch()
        for bits, fixed in (("tensor_parallel", 1), ("batch", 1), ("fast", 0), (None, 0)):
            with patched(bits=bits):
                run(model, labels, tokens)
                assert len(calls) == fixed, bits
                calls.clear()
        with switched_on(), patched(bits="fast"):
            run(model, labels, tokens)
            assert not calls
            for bits, fixed in (("fast", 0), ("batch", 1), (None, 1)):
                run(model, None, tokens, output_processor=NextTokenLogProbs(bits=bits))
                assert len(calls) == fixed, bits
                calls.clear()
    with pytest.raises(ValueError, match="bits is 'exact': it must be one of"):
        HeadSettings(bits="exact")


@on_gpt()
def test_bits_are_refused_where_megatron_makes_the_logits(model):
    """A hook that reads them, a layer whose loss is left to Megatron; "fast" leaves both as they are."""
    tokens, labels, _ = batch()
    stock = run(model, labels, tokens)
    layer = model.output_layer
    hooks = {
        "the loss of GPTModel is taken from logits that Megatron made": (
            layer.register_forward_hook,
            lambda module, inputs, outputs: outputs[0].sum() and None,
        ),
        "and cannot go into GPTModel: its output layer has backward hooks": (
            layer.register_full_backward_hook,
            lambda module, before, after: None,
        ),
    }
    for said, (register, hook) in hooks.items():
        with register(hook):
            with patched(bits="batch"), pytest.raises(ValueError, match=said):
                run(model, labels, tokens)
            with patched(bits="fast"):
                torch.testing.assert_close(run(model, labels, tokens), stock)


@contextmanager
def vllm_asked():
    """Set vLLM's variable, as verl does where `rollout.full_determinism` is True, and users of TRL's vLLM by hand."""
    with mock.patch.dict(os.environ, {checks.VLLMS: "1"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "VLLM_BATCH_INVARIANT is set")
        yield


@contextmanager
def entered():
    with batch_invariant_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batch_invariant_mode is on")
        yield


@pytest.mark.parametrize("on", [switched_on, entered, vllm_asked], ids=["Megatron's switch", "ours", "vLLM's variable"])
def test_the_mode_reaches_every_head(on):
    """Functions, losses and adapters that say nothing of bits: their head is an `LmHead`."""
    hidden, weight = torch.randn(5, 8), torch.randn(16, 8)
    labels = torch.arange(5)
    with on(), fixed_calls() as calls:
        together = linear_log_probs(hidden, weight, labels)
        alone = [linear_log_probs(hidden[i : i + 1], weight, labels[i : i + 1]) for i in range(5)]
        assert torch.equal(together, torch.cat(alone))
        assert len(calls) == 6
        linear_log_probs(hidden, weight, labels, bits="fast")
        assert len(calls) == 6
        log_probs, _ = verl.linear_cross_entropy(hidden, weight, labels)
        assert torch.equal(log_probs, together)
        (log_probs, _) = verl.FusedLinearForPPO()(hidden, weight, labels)
        assert torch.equal(log_probs, together)
        log_probs, *_ = trl._per_token(LmHead(weight), hidden, labels, ("log_probs",))
        assert torch.equal(log_probs, together)
        assert len(calls) == 9
        found = model_utils.from_parallel_hidden_states_to_logprobs(
            hidden[:, None], weight, None, labels[None], 0, 16, None, hidden_layout="replicated"
        )
        assert torch.equal(found[0], linear_log_probs(hidden[:4], weight, labels[1:]))
        assert len(calls) == 11


@on_gpt()
def test_free_memory_does_not_change_repeated_runs(model):
    """Megatron's `deterministic_mode` bounds the cache, and one warning says so."""
    with patched(cache="auto"):
        tokens, labels, _ = batch()
        heads, resolved = [], LmHead.resolved
        with mock.patch.object(LmHead, "resolved", lambda head: heads.append(head.cache) or resolved(head)):
            run(model, labels, tokens)
            model.config.deterministic_mode = True
            batch_invariance.say_once.cache_clear()
            with warnings.catch_warnings(record=True, action="always") as said:
                run(model, labels, tokens)
                run(model, labels, tokens)
        assert list(dict.fromkeys(heads)) == ["auto", "bounded"]
        found = [
            one for one in said if 'deterministic_mode is on: the fused head takes cache="bounded"' in str(one.message)
        ]
        assert len(found) == 1


@pytest.mark.slow
@grouped(1)
@pytest.mark.parametrize("spec", [None, gpt_layer_spec], ids=["Megatron's layers", "ours"])
def test_a_whole_model_keeps_a_rows_bits(spec):
    with patched(), entered():
        model, (tokens, labels, _) = one_gpt(spec=spec), batch()
        together = run(model, labels, tokens).detach()
        for row in (0, 1):
            ids, positions = tokens[row : row + 1], torch.arange(SEQ)[None]
            alone = model(ids, positions, causal_mask(SEQ), labels=labels[row : row + 1]).detach()
            assert torch.equal(alone[0], together[row])


def test_megatrons_own_switch_is_the_one_that_is_read():
    """The module and the names that `is_on` goes by, as this Megatron-Core has them."""
    kernels = pytest.importorskip(batch_invariance.KERNELS)
    assert not batch_invariance.switched_on()
    with mock.patch.object(kernels, "_batch_invariant_MODE", True):
        assert batch_invariance.switched_on()
        assert batch_invariance.is_on()
