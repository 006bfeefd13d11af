"""The check behind docs/parallelize_table.md, of classes that were wrong once and of models made wrong here."""

from unittest import mock

import pytest
import transformers

from megatron_ext.dtensor import plans
from tests.dtensor.any_class import outcome
from tests.dtensor.tiny_models import tiny
from tests.ranks import ranks


def outcome_of(name, layout):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    return outcome(name, tiny(getattr(transformers, name)).config, layout)


@ranks(2)
def test_logits_to_keep_that_reach_attention_are_no_matter():
    assert outcome_of("GotOcr2ForConditionalGeneration", {"cp": 2}) == ("right", "")


@ranks(2)
def test_statistics_over_a_cut_block_are_refused():
    kind, why = outcome_of("Gemma3nForCausalLM", {"tp": 2})
    assert kind == "refused"
    assert "layers.0.mlp, whose pieces do not add up" in why


@ranks(2)
def test_a_cut_block_that_is_not_refused_is_found_wrong():
    with mock.patch.object(plans, "cut_in_vain", return_value=None):
        assert outcome_of("Gemma3nForCausalLM", {"tp": 2})[0] == "WRONG"


@ranks(2)
def test_one_ranks_part_of_a_gradient_is_found_wrong():
    with (
        mock.patch.object(plans, "_unknown", return_value="all of it"),
        mock.patch.object(plans, "with_summed_gradients", lambda model, plan: plan),
        mock.patch("megatron_ext.dtensor.parallelize.check_first_gradients"),
    ):
        kind, why = outcome_of("ApertusForCausalLM", {"tp": 2})
    assert kind == "WRONG"
    assert "gradient of model.layers" in why
