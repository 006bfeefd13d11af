"""MEGATRON_EXT_FUSION=off: whatever was asked for, models compute what they would without the package."""

import logging
import os
from argparse import Namespace
from unittest import mock

import pytest
import torch

from megatron_ext import fusion_report, restore_tensor_parallel, run, substitute_tensor_parallel
from megatron_ext.dtensor import causal_lm_loss
from megatron_ext.dtensor.output.hidden_states_or_logits import say_once
from megatron_ext.integrations import trl
from megatron_ext.megatron.build_check import check_models
from megatron_ext.megatron.fusion_report import reset_fusion_report
from megatron_ext.megatron.spec_head import with_fused_head
from tests.dtensor.models import VOCAB, drawn, make, meshes, parallelize
from tests.gpt import model_parallel, stock_spec
from tests.megatron.patching import batch, counting_logits, grads_of, one_gpt, patched, unpatch
from tests.megatron.patching import run as run_gpt
from tests.operators import Largest
from tests.ranks import ranks

REASON = "MEGATRON_EXT_FUSION=off is set in the environment"


def off():
    return mock.patch.dict(os.environ, MEGATRON_EXT_FUSION="off")


@ranks(1)
def test_patched_model_keeps_megatrons_loss_while_off():
    with model_parallel():
        reset_fusion_report()
        model, labels = one_gpt(), batch()[1]
        stock = run_gpt(model, labels)
        expected = grads_of(model, stock)
        with patched(), counting_logits(model.output_layer) as made:
            with off(), pytest.warns(UserWarning, match=REASON):
                ours = run_gpt(model, labels)
            assert len(made) == 1
            assert torch.equal(ours, stock)
            assert all(torch.equal(grad, expected[name]) for name, grad in grads_of(model, ours).items())
            assert REASON in str(fusion_report())
            run_gpt(model, labels)  # on again
            assert len(made) == 1
        with patched(z_loss=0.1), off():
            assert REASON in str(check_models([model]))
            with pytest.raises(ValueError, match=f"was asked for z_loss=0.1, and cannot go into GPTModel: {REASON}"):
                run_gpt(model, labels)


@ranks(1)
def test_head_of_a_layer_spec_stays_out_while_off():
    with model_parallel():
        reset_fusion_report()
        try:
            model = one_gpt(spec=lambda config, stage: with_fused_head(stock_spec(config, stage), cache=0))
            with counting_logits(model.output_layer) as made, off(), pytest.warns(UserWarning, match=REASON):
                run_gpt(model, batch()[1])
            assert len(made) == 1
        finally:
            unpatch()


@ranks(1)
def test_substitution_leaves_megatrons_layers_while_off():
    from megatron.core import tensor_parallel

    stock = tensor_parallel.ColumnParallelLinear
    with off():
        assert substitute_tensor_parallel().names == ()
        assert tensor_parallel.ColumnParallelLinear is stock
        assert restore_tensor_parallel() is None


@ranks(2)
def test_parallel_model_makes_its_logits_while_off():
    tokens = drawn(2, 8)
    model = parallelize(make("llama"), *meshes(tp=2))
    fused = causal_lm_loss(model, tokens)
    say_once.cache_clear()
    with off(), Largest(lambda x: x.numel()) as largest, pytest.warns(UserWarning, match=REASON):
        own = causal_lm_loss(model, tokens)
    assert largest.size >= tokens.numel() * VOCAB // 2
    torch.testing.assert_close(own, fused, rtol=1e-6, atol=1e-6)


def test_integrations_replace_nothing_while_off(caplog):
    with off(), caplog.at_level(logging.INFO, "megatron_ext"):
        assert str(trl.apply()) == f"megatron_ext replaces nothing in trl: {REASON}"
    assert REASON in caplog.text
    trl.restore()


def test_launcher_shares_no_vocabulary_while_off(caplog):
    ways = dict.fromkeys(("tensor_parallel", "linear_ce", "check"), False)
    with off():
        run._change_megatron(run.command_line(), Namespace(pipeline_vocab=True, **ways))
    assert f"pipeline stages share no vocabulary: {REASON}" in caplog.text
