"""Layer specs that build Megatron-Core's GPTModel from our layers.

`gpt_layer_spec` is a `ModuleSpec`, ready for `GPTModel(transformer_layer_spec=...)` and for Megatron-LM's
`--spec megatron_ext.megatron.layer_specs gpt_layer_spec`. Parts that depend on the config (kind of norm, norms of
queries and keys, layers with experts) are chosen when the layers are built. `gpt_block_spec(config)` names the final
norm too, and with `transformer_engine=True` puts our linear layers beside Transformer Engine's norms and attention. For
HybridModel there is `megatron_ext.megatron.hybrid_layer_specs`; `megatron_ext.megatron.spec_head` adds the fused head
and its options to a spec.

A layer spec does not reach three modules of a GPTModel: the word embeddings and the output layer, which it takes from
`megatron.core.tensor_parallel` (`megatron_ext.substitute_tensor_parallel()` puts ours there), and the final norm.
Without Apex and Transformer Engine Megatron's final norm refuses sequence parallelism; only for that case, importing
this module gives Megatron our norm.

Raises:
    ImportError: on import, with a Megatron-Core whose way of building layers is unknown.
"""

# ruff: noqa: E402
import dataclasses
from functools import partial
from typing import Any

import torch

from megatron_ext.megatron import versions
from megatron_ext.megatron.substitute import megatrons_own_layer

versions.require_spec("spec")  # first, as an import below may be what is missing

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer import transformer_block
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm, WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_ext.megatron.attention import CoreAttention
from megatron_ext.megatron.norms import Norm, StandaloneNorm
from megatron_ext.tensor_parallel import layers


def _known_as_megatrons(ours: type) -> type:
    """Return our layer as a subclass of Megatron's class of the same name, by which LoRA and others recognise it."""
    names = {"__module__": __name__, "__doc__": ours.__doc__, "__repr__": torch.nn.Module.__repr__}
    return type(ours.__name__, (ours, megatrons_own_layer(ours)), names)


ColumnParallelLinear: Any = _known_as_megatrons(layers.ColumnParallelLinear)
RowParallelLinear: Any = _known_as_megatrons(layers.RowParallelLinear)

# Settings that make Megatron build other layers or specs, with the values that these specs serve. Versions lack some.
_OTHER_LAYERS: dict[str, Any] = {
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "heterogeneous_block_specs": False,
    "enable_hyper_connections": False,
    "use_transformer_engine_op_fuser": False,
    "use_te_activation_func": False,
    "use_kitchen": False,
    "use_kitchen_attention": False,
    "quant_recipe": None,
    "fp8": None,
    "fp4": None,
}


def check_config(config: Any) -> None:
    """Refuse a config that asks for other layers than these specs have.

    Raises:
        ValueError: names the setting.
    """
    for name, plain in _OTHER_LAYERS.items():
        value = getattr(config, name, plain)
        if value != plain:
            raise ValueError(
                f"config.{name} is {value!r}: megatron_ext's layer specs have plain attention, MLPs and linear layers, "
                f"of one kind in all layers and in the dtype of their inputs; take Megatron's own layer spec, which "
                f"the patch and the substitution serve, or leave {name} at {plain!r}"
            )


def layers_with_experts(config: Any) -> list[bool]:
    """Tell for each layer whether it has experts, by `config.num_moe_experts` and `config.moe_layer_freq`.

    Raises:
        ValueError: `config.moe_layer_freq` is a list of another length than the model.
    """
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    freq = config.moe_layer_freq
    pattern = freq if isinstance(freq, list) else [int(i % freq == 0) for i in range(config.num_layers)]
    if len(pattern) != config.num_layers:
        raise ValueError(
            f"config.moe_layer_freq is {freq}: a list says 0 or 1 for each of the {config.num_layers} layers; "
            f"pass {config.num_layers} of them, or a number n for experts in every n-th layer"
        )
    return list(map(bool, pattern))


class ExtSpecProvider(BackendSpecProvider):
    """Megatron's provider of layer classes, with our classes."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> type | None:
        return None

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return StandaloneNorm

    def norm_before_linear(self) -> type:
        """Return the class of a norm that Transformer Engine's layers fuse with the linear layer after it."""
        return Norm

    def core_attention(self) -> type:
        return CoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False) -> Any:
        if moe_use_grouped_gemm:
            raise ValueError(
                "moe_grouped_gemm is True: the experts of this spec run one after another; set "
                "moe_grouped_gemm=False, or use Transformer Engine's layer spec"
            )
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        if versions.EXPERTS_BUILDER.is_there():
            return partial(SequentialMLP, submodules=linear)
        return SequentialMLP, linear

    def activation_func(self) -> type | None:
        return None


class ExtBesideTransformerEngine(ExtSpecProvider):
    """Our linear layers; norms, attention and grouped experts are Transformer Engine's."""

    def __init__(self) -> None:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        self._engine = TESpecProvider()

    def layer_norm(self, *args: Any, **kwargs: Any) -> type:
        return self._engine.layer_norm(*args, **kwargs)

    def norm_before_linear(self) -> type:
        return self.layer_norm()

    def core_attention(self) -> type:
        return self._engine.core_attention()

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *args: Any, **kwargs: Any) -> Any:
        if moe_use_grouped_gemm:
            return self._engine.grouped_mlp_modules(True, *args, **kwargs)
        return super().grouped_mlp_modules(False, *args, **kwargs)


class ExtSelfAttention(SelfAttention):
    """Megatron's self-attention, with the norms of queries and keys that the config asks for.

    Raises:
        ValueError: the config asks for another kind of layer.
    """

    def __init__(self, config, submodules: SelfAttentionSubmodules, *args, **kwargs):
        check_config(config)
        norm = submodules.q_layernorm if config.qk_layernorm else IdentityOp
        if getattr(config, "qk_l2_norm", False):  # not in 0.14
            norm = L2Norm
        submodules = dataclasses.replace(submodules, q_layernorm=norm, k_layernorm=norm)
        super().__init__(config, submodules, *args, **kwargs)


class ExtTransformerLayer(TransformerLayer):
    """Megatron's layer, with or without experts as the config says for the layer's position in the model.

    Its checkpoints leave out the extra state of a norm that Transformer Engine fuses with a linear layer: the fused
    layer stores only the linear layer's. Loading a checkpoint leaves the norm's extra state as it is.

    Raises:
        ValueError: the config asks for another kind of layer, or for grouped experts.
    """

    def __init__(self, config, submodules: TransformerLayerSubmodules, layer_number: int = 1, *args, **kwargs):
        check_config(config)
        submodules = self._with_mlp_of_layer(config, submodules, layer_number, **kwargs)
        super().__init__(config, submodules, layer_number, *args, **kwargs)

    @staticmethod
    def _with_mlp_of_layer(
        config, submodules: TransformerLayerSubmodules, layer_number: int, vp_stage=None, pg_collection=None, **_: Any
    ) -> TransformerLayerSubmodules:
        """Return the submodules, with our other kind of MLP and its norm if the config asks for that kind."""
        kinds = gpt_layer_spec.submodules, gpt_moe_layer_spec.submodules
        pp = getattr(pg_collection, "pp", None)
        stage = (config, vp_stage) if pp is None else (config, vp_stage, pp.rank())
        number = layer_number + get_transformer_layer_offset(*stage)
        # Layers of multi-token prediction have numbers above `config.num_layers`, and are as the last layer.
        wanted = layers_with_experts(config)[min(number, config.num_layers) - 1]
        if submodules.mlp != kinds[not wanted].mlp:  # the right kind already, or an MLP that is not ours
            return submodules
        if wanted and config.moe_grouped_gemm:
            ExtSpecProvider().grouped_mlp_modules(True)
        names = ("mlp", "pre_mlp_layernorm", "sharded_state_dict_keys_map")
        return dataclasses.replace(submodules, **{name: getattr(kinds[wanted], name) for name in names})

    def sharded_state_dict(self, *args, **kwargs):
        state = super().sharded_state_dict(*args, **kwargs)
        for name, value in state.items():
            if isinstance(value, ShardedObject) and value.key.endswith(".layer_norm__extra_state"):
                state[name] = LocalNonpersistentObject(value.data)
        return state


def self_attention_spec(backend: BackendSpecProvider | None = None) -> ModuleSpec:
    """Return the spec of causal self-attention on our layers, or on those of `backend`."""
    backend = backend or ExtSpecProvider()
    return ModuleSpec(
        module=ExtSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=backend.layer_norm(for_qk=True),
        ),
    )


def _layer_spec(
    num_experts: int | None, backend: BackendSpecProvider | None = None, grouped_experts: bool = False
) -> ModuleSpec:
    backend = backend or ExtSpecProvider()
    # Checkpoints name norms as Transformer Engine's layers do, which fuse a norm with the dense layer after it: models
    # of both kinds load each other's. (Megatron's local spec uses the dense layer's name before experts too.)
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if num_experts is None:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=ExtTransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=backend.norm_before_linear(),
            self_attention=self_attention_spec(backend),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=backend.norm_before_linear() if num_experts is None else backend.layer_norm(),
            mlp=get_mlp_module_spec_for_backend(backend, num_experts=num_experts, moe_grouped_gemm=grouped_experts),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names,
        ),
    )


gpt_layer_spec = _layer_spec(num_experts=None)
"""The spec of a layer for `GPTModel(transformer_layer_spec=...)`: linear layers, norms and attention are ours.

`config.num_moe_experts` and `config.moe_layer_freq` (every n-th layer, or a list of 0 and 1) say which layers have
experts.
"""

# The config gives the number of experts when the layer is built; here any number selects a mixture.
gpt_moe_layer_spec = _layer_spec(num_experts=1)
"""The same as `gpt_layer_spec` in effect: the config says which layers have experts."""


def gpt_block_spec(
    config, vp_stage: int | None = None, pp_rank: int | None = None, *, transformer_engine: bool = False
) -> TransformerBlockSubmodules:
    """Return this pipeline stage's layers and final norm, for `GPTModel(transformer_layer_spec=...)`.

    All modules are ours; with `transformer_engine` only the linear layers are, beside Transformer Engine's norms and
    attention, and its grouped experts if `config.moe_grouped_gemm` asks for them. `config.num_moe_experts` and
    `config.moe_layer_freq` (every n-th layer, or a list of 0 and 1) say which layers have experts.

    Raises:
        ImportError: `transformer_engine` is True, and Megatron-Core could not import Transformer Engine.
        ValueError: `config.moe_layer_freq` is a list of another length than the model, or the config asks for other
            kinds of layers.
    """
    check_config(config)
    backend = ExtSpecProvider()
    if transformer_engine:
        versions.require_transformer_engine("gpt_block_spec(transformer_engine=True)")
        backend = ExtBesideTransformerEngine()
    stage = (config, vp_stage) if pp_rank is None else (config, vp_stage, pp_rank)  # Megatron-Core 0.14 takes no rank
    first, count = get_transformer_layer_offset(*stage), get_num_layers_to_build(*stage)
    with_experts = layers_with_experts(config)
    grouped = config.moe_grouped_gemm
    kinds = {has: _layer_spec(1 if has else None, backend, has and grouped) for has in dict.fromkeys(with_experts)}
    specs = [kinds[has] for has in with_experts[first:][:count]]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=backend.layer_norm())


def with_our_norms(spec: Any) -> Any:
    """Return a copy of a layer or block spec with our norm in each place of Megatron's torch fallback.

    Megatron's own layers need it under sequence parallelism without Apex and Transformer Engine.
    """
    if spec is WrappedTorchNorm:
        return Norm
    if isinstance(spec, list):
        return [with_our_norms(item) for item in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = [field.name for field in dataclasses.fields(spec)]
        return dataclasses.replace(spec, **{name: with_our_norms(getattr(spec, name)) for name in fields})
    return spec


class _FinalNorm:
    """Megatron's own final norm; under sequence parallelism, where building that raises, ours."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, *args, **kwargs):
        kind = Norm if config.sequence_parallel else WrappedTorchNorm
        return kind(config, hidden_size, eps, *args, **kwargs)


if transformer_block.LayerNormImpl is WrappedTorchNorm:
    transformer_block.LayerNormImpl = _FinalNorm
