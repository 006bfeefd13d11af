"""Settings that our layer specs refuse by name, the layers that they build, and norms in checkpoints."""

import functools

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.spec_utils import build_module

from megatron_ext.megatron import norms, versions
from megatron_ext.megatron.layer_specs import gpt_block_spec, gpt_layer_spec, gpt_moe_layer_spec
from tests.gpt import (
    EXPERTS,
    forward_step,
    grouped,
    loss_and_grads,
    model_parallel,
    ours_everywhere,
    sharded_state,
    stock_spec,
    tiny_batches,
    tiny_config,
    tiny_gpt,
)
from tests.megatron.language_models import tiny_hybrid_chunks
from tests.ranks import ranks


@grouped(1)
@pytest.mark.parametrize(
    "name,value",
    [
        ("multi_latent_attention", True),
        ("experimental_attention_variant", "gated_delta_net"),
        ("heterogeneous_block_specs", True),
        ("use_kitchen", True),
        ("use_te_activation_func", True),
        ("quant_recipe", "recipe"),
        ("fp8", "hybrid"),
        ("fp4", "e2m1"),
    ],
)
def test_settings_that_need_other_layers_are_refused(name, value):
    config = tiny_config()
    gpt_block_spec(config)
    setattr(config, name, value)  # past the checks of the config itself
    for build in (gpt_block_spec, functools.partial(build_module, gpt_layer_spec)):
        with pytest.raises(ValueError, match=rf"config\.{name} is {value!r}: .* take Megatron's own layer spec"):
            build(config=config)


@ranks(1, 2)
@pytest.mark.parametrize("freq", [1, [0, 1], [1, 0]], ids=["all", "second", "first"])
def test_layer_spec_has_experts_where_the_config_says(freq):
    """Loss and gradients are those of Megatron's own specs; the spec once built a dense model."""
    pipeline = torch.distributed.get_world_size()
    with model_parallel(pp=pipeline):

        def stock(config, stage):
            return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)

        settings = {**EXPERTS, "moe_layer_freq": freq}
        expected = loss_and_grads(tiny_gpt(stock, **settings), tiny_batches()[0])
        for spec in (gpt_layer_spec, gpt_moe_layer_spec, gpt_block_spec):
            chunks = tiny_gpt(spec, **settings)
            experts = [hasattr(layer.mlp, "experts") for layer in chunks[0].decoder.layers]
            first = torch.distributed.get_rank() if pipeline > 1 else 0
            assert experts == [bool(n) for n in ([1, 1] if freq == 1 else freq)][first:][: len(experts)]
            loss, grads = loss_and_grads(chunks, tiny_batches()[0])
            assert loss == pytest.approx(expected[0], rel=1e-6)
            assert grads.keys() == expected[1].keys()
            for name, grad in grads.items():
                torch.testing.assert_close(grad, expected[1][name], rtol=1e-4, atol=1e-6)


@grouped(1)
def test_grouped_experts_are_refused_by_the_layer_spec():
    with pytest.raises(ValueError, match="moe_grouped_gemm is True"):
        tiny_gpt(gpt_layer_spec, **EXPERTS, moe_grouped_gemm=True)


@grouped(2)
def test_layers_of_the_spec_are_known_as_megatrons():
    """LoRA of Megatron-Bridge asks for the class, and refused "Layer type is unrecognized for LoRA"."""

    def adapted(layer):
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        if isinstance(layer, ColumnParallelLinear):
            return "column", layer.input_size, layer.output_size, layer.explicit_expert_comm
        if isinstance(layer, RowParallelLinear):
            return "row", layer.input_size, layer.output_size, layer.explicit_expert_comm
        raise NotImplementedError(f"Layer type is unrecognized for LoRA: {type(layer)}")

    def kinds(model):
        layers = {name: layer for name, layer in model.named_modules() if ".linear_" in name}
        return {name: (type(layer).__name__, *adapted(layer)) for name, layer in layers.items()}

    expected = kinds(tiny_gpt(stock_spec)[0])
    assert len(expected) == 8
    assert kinds(tiny_gpt(gpt_layer_spec)[0]) == expected
    layer = tiny_gpt(gpt_layer_spec)[0].decoder.layers[0].mlp.linear_fc1
    assert "communication=" in repr(layer)
    with ours_everywhere():
        assert adapted(layer)[0] == "column"
        assert kinds(tiny_gpt(gpt_layer_spec)[0]) == expected


@grouped(1)
def test_a_list_of_another_length_than_the_layers_is_refused():
    config = tiny_config(moe_layer_freq=[0, 1], **EXPERTS)
    assert len(gpt_block_spec(config).layer_specs) == 2
    config.moe_layer_freq = [1]
    with pytest.raises(ValueError, match=r"moe_layer_freq is \[1\]: .* 2 layers"):
        gpt_block_spec(config)


@grouped(1)
def test_transformer_engines_layers_where_it_is_missing():
    with pytest.raises(ImportError) as told:
        gpt_block_spec(tiny_config(), transformer_engine=True)
    assert str(told.value).startswith(
        "gpt_block_spec(transformer_engine=True) needs Transformer Engine, which Megatron"
    )
    assert "without a GPU megatron_on_cpu(transformer_engine=True) needs only its Python part" in str(told.value)


@grouped(1)
@pytest.mark.parametrize("present", [False, True], ids=["without", "with"])
def test_norms_of_their_own_store_what_transformer_engines_do(present, monkeypatch):
    monkeypatch.setattr(norms, "have_transformer_engine", lambda: present)
    (model,) = tiny_gpt(gpt_block_spec, qk_layernorm=True, **EXPERTS)
    state = sharded_state(model)
    extra = {name for name in state if "norm" in name and name.endswith("_extra_state")}
    expected = {"decoder.final_layernorm"} | {
        f"decoder.layers.{layer}.{norm}"
        for layer in range(2)
        for norm in ("pre_mlp_layernorm", "self_attention.q_layernorm", "self_attention.k_layernorm")
    }
    assert extra == ({f"{name}._extra_state" for name in expected} if present else set())
    loaded = model.state_dict() | {"decoder.final_layernorm._extra_state": torch.zeros(3)}
    loaded["decoder.final_layernorm.weight"] = loaded["decoder.final_layernorm.weight"] + 2
    model.load_state_dict(loaded, strict=True)
    assert torch.equal(model.decoder.final_layernorm.weight, loaded["decoder.final_layernorm.weight"])


@grouped(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fp32_residuals_run_beside_16_bit_weights(sequence_parallel):
    found = []
    for settings in ({}, {"bf16": True, "params_dtype": torch.bfloat16, "fp32_residual_connection": True}):
        (model,) = tiny_gpt(gpt_block_spec, sequence_parallel=sequence_parallel, **settings)
        model = model.bfloat16() if settings else model
        loss = forward_step(iter([tiny_batches()[0]]), model)[0].mean()
        loss.backward()
        found.append((loss.item(), model.decoder.layers[0].mlp.linear_fc1.weight.grad.float()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-2)
    assert (found[1][1] - found[0][1]).norm() < 0.05 * found[0][1].norm()


# -- HybridModel on our layers -----------------------------------------------------------------------------------------

HYBRID = pytest.mark.skipif(not versions.HYBRID_MODEL.is_there(), reason="HybridModel came with Megatron-Core 0.18")


@HYBRID
@ranks(2)
@pytest.mark.parametrize(
    "sizes,options",
    [
        ({"tp": 2}, {"pattern": "*-"}),
        pytest.param({"tp": 2}, {"sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param({"ep": 2}, EXPERTS | {"moe_ffn_hidden_size": 32}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_numbers_of_megatrons_layers(sizes, options):
    def result(ours):
        return loss_and_grads(tiny_hybrid_chunks(tied=False, ours=ours, **options), tiny_batches()[0])

    with model_parallel(**sizes):
        stock, stock_grads = result(False)
        with ours_everywhere():
            both = result(True)
        ours = result(True)
    for loss, grads in (ours, both):
        assert loss == pytest.approx(stock, rel=1e-6)
        assert grads.keys() == stock_grads.keys()
        for name, grad in grads.items():
            assert (grad - stock_grads[name]).norm() <= 1e-6 * stock_grads[name].norm(), name


@HYBRID
@grouped(1)
def test_other_kinds_of_layers_are_refused():
    with pytest.raises(ValueError, match="pattern has a gdn layer.*use Megatron's own"):
        tiny_hybrid_chunks(ours=True, pattern="*G")


@HYBRID
@ranks(1)
def test_every_parameter_lies_in_our_layers():
    for _ in range(2):  # the emulation has a final norm for Megatron's own hybrid models each time it is entered
        with model_parallel(), ours_everywhere():
            (model,) = tiny_hybrid_chunks(tied=False, ours=True)
        homes = {type(m).__module__ for m in model.modules() if any(True for _ in m.parameters(recurse=False))}
        assert homes
        assert all(home.startswith("megatron_ext.") for home in homes), homes
