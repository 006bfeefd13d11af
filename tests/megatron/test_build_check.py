"""Report of what would be fused, for models that are built and not yet trained."""

from functools import partial

import pytest
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_ext.megatron.build_check import check_models, stop_when_built
from tests.gpt import causal_mask, grouped, tiny_batches, tiny_gpt


@grouped(1)
def test_what_would_be_fused():
    (model,) = tiny_gpt(mtp_num_layers=1)
    found = check_models([torch.nn.Sequential(model)])
    assert found.passed
    (one,) = found.models
    assert (one.model, one.has_output_layer, one.losses, one.why_not) == ("GPTModel", True, 2, None)
    assert sum(one.layers.values()) == 2 + 3 * 4 + 1  # embedding and output layer, two layers and MTP's, eh_proj
    assert "fused, 2 losses of each micro-batch without logits; tensor-parallel layers: 15 of megatron" in str(found)


@grouped(1)
def test_what_would_be_left_out_and_why():
    (model,) = tiny_gpt()
    model.output_layer.forward = partial(model.output_layer.forward)
    found = check_models([model])
    assert not found.passed
    assert "the first batch decides: its output layer has a forward of its own" in str(found)
    assert not check_models([]).passed
    assert "built no language model" in str(check_models([]))


@grouped(2, pp=2)
def test_a_stage_without_an_output_layer_has_nothing_to_fuse():
    found = check_models(tiny_gpt())
    last = torch.distributed.get_rank() == 1
    assert found.passed
    assert found.models[0].has_output_layer == last
    assert ("no output layer on this pipeline stage" in str(found)) != last


@grouped(1)
@pytest.mark.parametrize("built_by", ["optimizer", "forward"])
def test_a_script_stops_when_its_models_are_built(built_by):
    seen, init, construct = [], torch.optim.Optimizer.__init__, LanguageModule.__init__
    before = tiny_gpt()  # as another test may leave them behind
    stop_when_built(seen.append)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # of no language model: the script goes on
    torch.optim.SGD(before[0].parameters())
    (model,) = tiny_gpt()
    tokens = tiny_batches()[0][:, :-1]
    positions, mask = torch.arange(tokens.shape[1]).expand_as(tokens), causal_mask(tokens.shape[1])
    first = {
        "optimizer": lambda: torch.optim.SGD(model.parameters()),
        "forward": lambda: model(tokens, positions, mask),
    }
    with pytest.raises(SystemExit) as stopped:
        first[built_by]()
    assert stopped.value.code == 0
    assert [(one.model, one.why_not) for one in seen[0].models] == [("GPTModel", None)]
    assert torch.optim.Optimizer.__init__ is init
    assert LanguageModule.__init__ is construct
    torch.nn.Linear(1, 1)(torch.ones(1))
