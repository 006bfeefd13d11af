"""A layer spec that builds Megatron-Core's HybridModel from our layers: `hybrid_stack_spec`.

Pass the spec as `HybridModel(hybrid_stack_spec=...)`, or to Megatron-LM as `--spec
megatron_ext.megatron.hybrid_layer_specs hybrid_stack_spec`. The letters of a pattern like "M*-E" stand for layers: `*`
attention, `-` MLP, `E` experts, all built from our linear layers, norms and attention; `M` Mamba-2, whose projections
are our layers and whose kernels are `mamba_ssm`'s, or under the emulation plain PyTorch. Other letters are refused when
the model is built.

Like a layer spec of GPTModel, the stack spec reaches neither the word embeddings nor the output layer
(`megatron_ext.substitute_tensor_parallel()` does). The final norm is Transformer Engine's if that is installed, else
ours.

Raises:
    ImportError: on import, if Megatron-Core has no HybridModel (before 0.18), or takes layers that ours do not fit.
"""

# ruff: noqa: E402
from typing import Any

from megatron_ext.megatron import versions

versions.require_spec("hybrid spec")  # first, as an import below may be what is missing

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_ext.megatron.fused_loss.module_calls import attribute
from megatron_ext.megatron.layer_specs import (
    ColumnParallelLinear,
    ExtSpecProvider,
    RowParallelLinear,
    check_config,
    self_attention_spec,
)
from megatron_ext.megatron.norms import Norm, StandaloneNorm
from megatron_ext.tensor_parallel._random.transformer_engine import have_transformer_engine


class _Refused:
    """Stand-in for a kind of layer that this spec lacks; building it raises ValueError."""

    def __init__(self, config: Any, *args: Any, kind: str, **kwargs: Any):
        raise ValueError(
            f"the hybrid layer pattern has a {kind} layer: megatron_ext's hybrid_stack_spec has attention (*), MLP "
            "(-), experts (E) and Mamba (M); use Megatron's own hybrid_stack_spec for this model"
        )


# Checkpoints name norms as Transformer Engine's fused layers do: models of both kinds load each other's checkpoints.
_MAMBA = ModuleSpec(
    module=MambaLayer,
    submodules=MambaLayerSubmodules(
        norm=Norm,
        mixer=ModuleSpec(
            module=MambaMixer,
            submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        ),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    ),
)

_ATTENTION = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=self_attention_spec(),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    ),
)

_MLP = ModuleSpec(
    module=MLPLayer,
    submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=Norm,
        mlp=get_mlp_module_spec_for_backend(ExtSpecProvider()),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    ),
)

_EXPERTS = ModuleSpec(
    module=MoETransformerLayer,
    submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=StandaloneNorm,
        # The config gives the number of experts when the layer is built; here any number selects a mixture.
        mlp=get_mlp_module_spec_for_backend(ExtSpecProvider(), num_experts=1),
        mlp_bda=get_bias_dropout_add,
    ),
)

_MULTI_TOKEN_PREDICTION = ModuleSpec(
    module=MultiTokenPredictionBlock,
    submodules=MultiTokenPredictionBlockSubmodules(
        layer_specs=[
            ModuleSpec(
                module=MultiTokenPredictionLayer,
                submodules=MultiTokenPredictionLayerSubmodules(
                    enorm=StandaloneNorm,
                    hnorm=StandaloneNorm,
                    eh_proj=ColumnParallelLinear,
                    mtp_model_layer=None,  # made from the pattern and the layers above
                    layer_norm=StandaloneNorm,
                ),
            )
        ]
    ),
)

_SERVED = {
    "mamba_layer": _MAMBA,
    "attention_layer": _ATTENTION,
    "mlp_layer": _MLP,
    "moe_layer": _EXPERTS,
    "mtp_block_spec": _MULTI_TOKEN_PREDICTION,
}


class _Stack(HybridStack):
    """A HybridStack whose final norm is ours if Transformer Engine, whose norm Megatron's class builds, is missing."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        check_config(config)
        norm = hybrid_block.TENorm if have_transformer_engine() else Norm
        with attribute(hybrid_block, "TENorm", norm):
            super().__init__(config, *args, **kwargs)


hybrid_stack_spec = ModuleSpec(
    module=_Stack,
    submodules=HybridStackSubmodules(
        **{
            name: _SERVED.get(name, ModuleSpec(module=_Refused, params={"kind": name.removesuffix("_layer")}))
            for name in HybridStackSubmodules.__dataclass_fields__
        }
    ),
)
"""For `HybridModel(hybrid_stack_spec=...)` of Megatron-Core 0.18 and newer: attention, MLP, experts, Mamba layers."""
