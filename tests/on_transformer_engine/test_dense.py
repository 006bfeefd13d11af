"""Dense GPT models of Transformer Engine's layers train as those of Megatron's local layers."""

import pytest
import torch

from tests.gpt import model_parallel
from tests.on_transformer_engine.models import assert_te_is_local, te_spec, tiny_gpt
from tests.ranks import ranks


@ranks(1)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"normalization": "RMSNorm", "num_query_groups": 2},
        {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False},
        {"qk_layernorm": True, "tied": False},
    ],
    ids=["gpt", "rms", "swiglu", "qk-norm"],
)
def test_one_rank(overrides):
    assert_te_is_local({}, **overrides)


@pytest.mark.essential
@ranks(2)
def test_tensor_and_sequence_parallel():
    assert_te_is_local({"tp": 2}, sequence_parallel=True)


@pytest.mark.essential
@ranks(1)
def test_layers_are_transformer_engines():
    with model_parallel():
        (model,) = tiny_gpt(te_spec, transformer_impl="transformer_engine")
        modules = {type(module).__module__.split(".")[0] for module in model.modules()}
        kinds = {type(module).__mro__[1].__module__ for module in model.modules()}
    assert "megatron" in modules
    assert any(kind.startswith("transformer_engine.pytorch.module") for kind in kinds)


@ranks(1)
@pytest.mark.parametrize(
    "only_te",
    [
        {"use_cpu_initialization": False},  # the default of Megatron's scripts
        {"gradient_accumulation_fusion": True},
        {"use_te_activation_func": True},
        {"use_te_rng_tracker": True},
        {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
        {"apply_rope_fusion": True},
        {"fused_single_qkv_rope": True, "apply_rope_fusion": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_transformer_engine(only_te):
    assert_te_is_local({}, only_te)
