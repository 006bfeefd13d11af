"""HybridModel on our layers: Megatron's numbers, on the versions that have it."""

from contextlib import nullcontext

import pytest

from megatron_ext.megatron import versions
from tests import gpt
from tests.gpt import SEQUENCE, VOCAB, loss_and_grads, model_parallel, ours_everywhere, set_weights, tiny_batches
from tests.gpt import tiny_config as tiny_config_of_gpt
from tests.ranks import ranks

pytestmark = pytest.mark.skipif(not versions.HYBRID_MODEL.is_there(), reason="HybridModel came with Megatron-Core 0.18")

EXPERTS = gpt.EXPERTS | {"moe_ffn_hidden_size": 32}


def stock_layers(config):
    """The stack of our spec on Megatron's local layers; it has none of its own without Transformer Engine."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec_for_backend
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from tests.gpt import _SequenceParallelNorm

    attention = get_gpt_layer_local_spec().submodules.self_attention

    def layer(kind, **submodules):
        return ModuleSpec(module=kind, submodules=TransformerLayerSubmodules(**submodules))

    def mlp(kind, keys, **experts):
        backend = LocalSpecProvider()
        return layer(
            kind,
            pre_mlp_layernorm=_SequenceParallelNorm,
            mlp=get_mlp_module_spec_for_backend(backend, **experts),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,  # by the names in it tests.gpt draws the weights
        )

    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=layer(
                TransformerLayer,
                input_layernorm=_SequenceParallelNorm,
                self_attention=attention,
                self_attn_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
            ),
            mlp_layer=mlp(MLPLayer, {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}),
            moe_layer=mlp(MoETransformerLayer, {}, num_experts=4),
        ),
    )


def hybrid(spec, pattern, **overrides):
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_ext.megatron import hybrid_layer_specs

    config = tiny_config_of_gpt(num_layers=len(pattern), **overrides)
    model = HybridModel(
        config,
        hybrid_layer_specs.hybrid_stack_spec if spec is None else spec(config),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    set_weights(model)
    return [model]


@ranks(2)
@pytest.mark.parametrize(
    "sizes,pattern,options",
    [
        ({"tp": 2}, "*-", {}),
        pytest.param({"tp": 2}, "*-*-", {"sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param({"ep": 2}, "*E-", EXPERTS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_numbers_of_megatrons_layers(sizes, pattern, options):
    with model_parallel(**sizes):
        stock, stock_grads = loss_and_grads(hybrid(stock_layers, pattern, **options), tiny_batches()[0])
        with ours_everywhere():
            both, both_grads = loss_and_grads(hybrid(None, pattern, **options), tiny_batches()[0])
        with nullcontext():
            ours, our_grads = loss_and_grads(hybrid(None, pattern, **options), tiny_batches()[0])
    for loss, grads in ((ours, our_grads), (both, both_grads)):
        assert loss == pytest.approx(stock, rel=1e-6)
        assert grads.keys() == stock_grads.keys()
        for name, grad in grads.items():
            assert (grad - stock_grads[name]).norm() <= 1e-6 * stock_grads[name].norm(), name


@ranks(1)
def test_other_kinds_of_layers_are_refused():
    with model_parallel(), pytest.raises(ValueError, match=r"pattern has a gdn layer.*take Megatron's own"):
        hybrid(None, "*G", num_attention_heads=4)


@ranks(1)
def test_every_parameter_lies_in_our_layers():
    for _ in range(2):  # the emulation has a final norm for Megatron's own hybrid models each time it is entered
        with model_parallel(), ours_everywhere():
            (model,) = hybrid(None, "*-")
        homes = {type(m).__module__ for m in model.modules() if any(True for _ in m.parameters(recurse=False))}
        assert homes
        assert all(home.startswith("megatron_ext.") for home in homes), homes
