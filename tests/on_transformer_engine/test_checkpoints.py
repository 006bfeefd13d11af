"""Weights go from Transformer Engine's modules into ours and back, by Megatron's sharded state and by torch's."""

from functools import partial

import pytest
import torch

from tests.gpt import (
    child_processes,
    model_parallel,
    ours_everywhere,
    sharded_state,
    stock_spec,
    tiny_batches,
    tiny_config,
    tiny_gpt,
)
from tests.on_transformer_engine.models import ENGINE, our_spec, plain_loss, te_spec
from tests.on_transformer_engine.test_experts import MOE
from tests.on_transformer_engine.test_fp8 import SIZES
from tests.on_transformer_engine.test_overlap import BF16
from tests.ranks import ranks

SPECS = {
    "ours": our_spec,
    "beside": partial(our_spec, transformer_engine=True),
    "local": stock_spec,
    "te": te_spec,
}


def build(name, grouped=False, **overrides):
    """Grouped experts are Transformer Engine's alone."""
    engine = ENGINE | {"moe_grouped_gemm": grouped} if name in ("te", "beside") else {}
    return tiny_gpt(SPECS[name], tied=False, engine=name == "te", **engine, **overrides)[0]


def assert_weights_go_over(source, target, folder, **overrides):
    """Loads as strictly as Megatron's scripts by default: every key that is asked for is there, extra states too."""
    assert_loads(build(source, **overrides), build(target, **overrides), folder)


def assert_loads(stored, target, folder, **how):
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for parameter in target.parameters():
            parameter.fill_(0.5)
    with child_processes():
        dist_checkpointing.save(sharded_state(stored), str(folder))
    target.load_state_dict(dist_checkpointing.load(sharded_state(target), str(folder), **how), strict=True)
    expected, found = (plain_loss(model, tiny_batches()[0]) for model in (stored, target))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert expected > 1


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize(
    "source,target", [("te", "ours"), ("ours", "te"), ("te", "beside"), ("beside", "te"), ("te", "local")]
)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2-sp"])
def test_sharded_weights_of_one_load_into_the_other(source, target, sequence_parallel, tmp_path):
    with model_parallel(tp=2):
        assert_weights_go_over(source, target, tmp_path, sequence_parallel=sequence_parallel)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("source,target", [("te", "ours"), ("ours", "te"), ("te", "beside"), ("beside", "te")])
@pytest.mark.parametrize("grouped", [False, True], ids=["sequential", "grouped"])
def test_experts_load_into_each_other(source, target, grouped, tmp_path):
    with model_parallel(ep=2):
        assert_weights_go_over(source, target, tmp_path, grouped=grouped, qk_layernorm=True, **MOE)


@pytest.mark.slow
@ranks(1)
@pytest.mark.parametrize("source", ["local", "ours"])
def test_checkpoints_that_have_no_extra_states_of_norms(source, tmp_path, monkeypatch):
    """Checkpoints of local layers, and of ours without the engine, load where Megatron is told to be less strict."""
    with model_parallel():
        from megatron_ext.megatron import norms

        with monkeypatch.context() as without:
            without.setattr(norms, "have_transformer_engine", lambda: False)
            stored = build(source, qk_layernorm=True)
        assert_loads(stored, build("ours", qk_layernorm=True), tmp_path, strict="log_unexpected")


@ranks(1)
def test_module_state_loads_strictly_with_either_extra_state():
    with model_parallel():
        from megatron.core.extensions import transformer_engine as engine

        from megatron_ext.tensor_parallel import layers as ours

        options = {"init_method": torch.nn.init.normal_, "bias": True, "skip_bias_add": False, "is_expert": False}
        for name, more in (
            ("ColumnParallelLinear", {"gather_output": False}),
            ("RowParallelLinear", {"input_is_parallel": True}),
        ):
            theirs = getattr(engine, f"TE{name}")(32, 64, config=tiny_config(**ENGINE), **options, **more)
            mine = getattr(ours, name)(32, 64, config=tiny_config(), **options, **more)
            assert "_extra_state" in theirs.state_dict()
            assert "_extra_state" in mine.state_dict()
            for source, target in ((theirs, mine), (mine, theirs)):
                with torch.no_grad():
                    source.weight.normal_()
                target.load_state_dict(source.state_dict(), strict=True)
                assert torch.equal(target.weight, source.weight)
                assert torch.equal(target.bias, source.bias)


@ranks(2)
def test_weight_of_an_mxfp8_head_goes_to_a_plain_one_and_back(tmp_path):
    """Megatron's output layer for `fp8_output_proj`, and the one that is fused; which our substitution makes ours."""
    from megatron.core import dist_checkpointing
    from megatron.core.extensions import transformer_engine as engine

    if not hasattr(engine, "TELMHeadColumnParallelLinear"):
        pytest.skip("fp8_output_proj has no layer of its own before Megatron-Core 0.20")
    fp8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8", **SIZES, **BF16}
    for source, target in ((True, False), (False, True)):
        folder = tmp_path / str(source)
        folder.mkdir(exist_ok=True)
        with model_parallel(tp=2):
            with ours_everywhere():
                stored, loaded = (build("te", fp8_output_proj=one, vocab_size=128, **fp8) for one in (source, target))
                kinds = {one: type(model.output_layer) for one, model in ((source, stored), (target, loaded))}
                assert kinds[True] is engine.TELMHeadColumnParallelLinear
                assert kinds[False].__module__.startswith("megatron_ext.")
                expected = stored.output_layer.weight.detach().clone()
                with torch.no_grad():
                    loaded.output_layer.weight.zero_()
                with child_processes():
                    dist_checkpointing.save(sharded_state(stored), str(folder))
                loaded.load_state_dict(dist_checkpointing.load(sharded_state(loaded), str(folder)), strict=True)
        assert expected.abs().max() > 0.1
        assert torch.equal(loaded.output_layer.weight, expected)
