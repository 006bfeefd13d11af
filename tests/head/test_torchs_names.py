"""Calls as torch's function of the same name takes them, and the options that an editor offers."""

import inspect
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import (
    head,
    linear_cross_entropy,
    linear_log_probs,
    losses,
    token_log_probs,
    vocab_parallel_cross_entropy,
)
from megatron_ext.dtensor import causal_lm_log_probs, causal_lm_loss, parallelize, use_fused_loss
from megatron_ext.dtensor.pretrained.loading import ParallelizeOptions
from megatron_ext.head import LmHead, linear_topk_log_probs
from megatron_ext.head.checks import Cache
from megatron_ext.head.layer_facts import HeadFacts
from megatron_ext.losses.from_hidden import LogProbLossInputs
from megatron_ext.megatron.fused_loss.head_settings import HeadOptions, HeadSettings

X, W, Y = torch.randn(3, 8), torch.randn(5, 8), torch.zeros(3, dtype=torch.int64)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_places_are_those_of_torch():
    expected = F.linear_cross_entropy(X, W, Y)
    torch.testing.assert_close(linear_cross_entropy(X, W, Y, reduction="mean"), expected)


@pytest.mark.parametrize(
    "function, given, told",
    [
        (
            linear_cross_entropy,
            {"input": X, "linear_weight": W, "target": Y},
            "input is hidden, linear_weight is weight",
        ),
        (linear_cross_entropy, {"hidden": X, "weight": W, "target": Y}, "target is labels"),
        (linear_cross_entropy, {"input": X, "linear_weight": W, "target": Y}, 'reduction is "none" unless it is given'),
        (linear_log_probs, {"hidden": X, "weight": W, "labels": Y, "linear_bias": None}, "linear_bias is bias"),
        (linear_topk_log_probs, {"input": X, "weight": W, "k": 2}, "input is hidden, linear_weight is"),
        (linear_cross_entropy, {"hidden": X, "weight": W, "labels": Y, "chunk_size": 2}, "chunk_size is chunk_tokens"),
        (token_log_probs, {"input": X, "labels": Y}, "input is logits, target is labels"),
        (vocab_parallel_cross_entropy, {"logits": X, "target": Y}, "input is logits, target is labels"),
    ],
)
def test_torchs_name_of_an_argument_is_told(function, given, told):
    with pytest.raises(TypeError, match=told):
        function(**given)


@pytest.mark.parametrize("name", [name for name in head.__all__ if name.islower() and "mode" not in name])
def test_options_are_by_keyword_and_each_is_named(name):
    """Only tensors, the layout of the vocabulary, and a function's main parameters may be positional."""
    places = {"indices", "k", "top_k", "top_p", "temperature", "direction", "beta", "teacher_hidden", "teacher_weight"}
    places |= {"hidden", "weight", "labels", "logits", "student_hidden", "student_weight", "student_logits"}
    places |= {"teacher_logits", "tp_group", "hidden_layout", "vocab"}
    for parameter in inspect.signature(getattr(head, name)).parameters.values():
        assert parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.name in places
        assert parameter.kind is not parameter.VAR_KEYWORD or parameter.annotation is not Any


def test_completion_knows_every_fact_of_a_head():
    named = {field.name: field.type for field in fields(head.LmHead) if field.kw_only}
    assert set(named) == set(get_type_hints(HeadFacts))


def test_completion_knows_every_argument_of_a_loss():
    """A call from hidden states takes by keyword what one from log-probabilities does."""
    taken = {}
    for kind in (losses.GRPOLoss, losses.DPOLoss, losses.SimPOLoss, losses.ORPOLoss, losses.KTOLoss):
        taken |= get_type_hints(kind.from_log_probs)
    assert get_type_hints(LogProbLossInputs) | {"mask": Tensor | None} == {
        name: kind for name, kind in taken.items() if name not in ("log_probs", "return")
    }


def test_completion_knows_every_option_of_from_pretrained():
    keywords = [p for p in inspect.signature(parallelize).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert get_type_hints(ParallelizeOptions) == {p.name: p.annotation for p in keywords}


def test_cache_has_one_type_at_every_door():
    for function in (causal_lm_loss, causal_lm_log_probs, use_fused_loss, linear_cross_entropy, LmHead):
        assert inspect.signature(function).parameters["cache"].annotation == Cache


def test_completion_knows_every_option_of_the_patch():
    own = get_type_hints(HeadSettings)
    del own["nemo_rl_chunk_size"]  # the patch's own argument chunk_size
    assert get_type_hints(HeadOptions) == own
