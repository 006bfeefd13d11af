"""What our layer specs refuse, by the name of the setting; and norms in checkpoints."""

import pytest
import torch

from megatron_ext.megatron.layer_specs import gpt_block_spec, gpt_layer_spec
from tests.gpt import EXPERTS, model_parallel, sharded_state, tiny_config, tiny_gpt
from tests.ranks import ranks

LATENT = {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "v_head_dim": 8}


@ranks(1)
@pytest.mark.parametrize("spec", [gpt_block_spec, gpt_layer_spec], ids=["block", "layer"])
def test_multi_latent_attention_is_refused(spec):
    """It was built as plain attention."""
    refused = pytest.raises(ValueError, match="multi_latent_attention is True: .* take Megatron's own layer spec")
    with model_parallel(), refused:
        tiny_gpt(spec, **LATENT)


@ranks(1)
def test_other_kinds_of_attention_are_refused():
    """All layers were built with plain attention."""
    with model_parallel():
        config = tiny_config()
        gpt_block_spec(config)
        config.experimental_attention_variant = "gated_delta_net"  # past the kernels that its own checks ask for
        with pytest.raises(ValueError, match="experimental_attention_variant is 'gated_delta_net': .* plain"):
            gpt_block_spec(config)


@ranks(1)
def test_a_list_of_another_length_than_the_layers_is_refused():
    """It built fewer layers than the config has."""
    with model_parallel():
        config = tiny_config(moe_layer_freq=[0, 1], **EXPERTS)
        assert len(gpt_block_spec(config).layer_specs) == 2
        config.moe_layer_freq = [1]
        with pytest.raises(ValueError, match=r"moe_layer_freq is \[1\]: .* 2 layers"):
            gpt_block_spec(config)


@ranks(1)
def test_transformer_engines_layers_where_it_is_missing():
    with model_parallel(), pytest.raises(ImportError) as told:
        gpt_block_spec(tiny_config(), transformer_engine=True)
    assert str(told.value).startswith(
        "gpt_block_spec(transformer_engine=True) needs Transformer Engine, which Megatron"
    )
    assert "without a GPU megatron_on_cpu(transformer_engine=True) takes its Python part alone" in str(told.value)


@ranks(1)
@pytest.mark.parametrize("present", [False, True], ids=["without", "with"])
def test_norms_of_their_own_store_what_transformer_engines_do(present, monkeypatch):
    with model_parallel():
        from megatron_ext.megatron import norms

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
        model.load_state_dict(loaded, strict=True)
