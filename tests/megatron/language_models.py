"""Megatron's other models, tiny, without Transformer Engine or mamba_ssm: hybrid, BERT, T5, LLaVA, MIMO with vision."""

import copy
import dataclasses
import importlib
import inspect

import torch
from torch import nn

from tests.gpt import SEQUENCE, VOCAB, set_weights, stock_spec, tiny_config

PATTERN = "*-*-"  # attention and MLP layers
IMAGE, PATCH = 8, 4
PATCHES = (IMAGE // PATCH) ** 2
LLAVA_IMAGE = -200  # the token of an image, out of the vocabulary as in LLaVA
MIMO_IMAGE = VOCAB - 1


def either(new, old):
    """A module of Megatron's by the name that it has since 0.18, or by that of before."""
    try:
        return importlib.import_module(f"megatron.core.{new}")
    except ModuleNotFoundError:
        return importlib.import_module(f"megatron.core.{old}")


def hybrid_home():
    """The modules of the hybrid model and of its stack: HybridModel since 0.18, MambaModel before."""
    model = either("models.hybrid.hybrid_model", "models.mamba.mamba_model")
    return model, either("models.hybrid.hybrid_block", "ssm.mamba_block")


def mamba_layer():
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_ext.megatron.norms import Norm

    projections = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=Norm, mixer=ModuleSpec(module=MambaMixer, submodules=projections), mamba_bda=get_bias_dropout_add
        ),
    )


def hybrid_spec(config, stack, mtp: bool = False, our_attention: bool = False, with_mamba: bool = False):
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer import identity_op
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_ext.megatron.norms import Norm

    dense = copy.copy(config)
    dense.num_moe_experts = None
    parts, with_experts = (
        (spec.layer_specs[0] if hasattr(spec, "layer_specs") else spec).submodules
        for spec in (stock_spec(dense), stock_spec(config))
    )
    if our_attention:
        from megatron_ext.megatron.attention import CoreAttention

        parts.self_attention.submodules.core_attention = CoreAttention
    attention = dataclasses.replace(
        parts,
        pre_mlp_layernorm=identity_op.IdentityOp,
        mlp=identity_op.IdentityOp,
        mlp_bda=identity_op.IdentityFuncOp,
    )
    mlp = dataclasses.replace(
        parts,
        input_layernorm=identity_op.IdentityOp,
        self_attention=identity_op.IdentityOp,
        self_attn_bda=identity_op.IdentityFuncOp,
    )
    # As in Megatron's own spec: checkpoints name the norm before experts as the model does.
    experts = dataclasses.replace(mlp, mlp=with_experts.mlp, sharded_state_dict_keys_map={})
    name = "HybridStack" if hasattr(stack, "HybridStack") else "MambaStack"
    submodules = getattr(stack, f"{name}Submodules")(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        **({"moe_layer": ModuleSpec(module=TransformerLayer, submodules=experts)} if config.num_moe_experts else {}),
    )
    if with_mamba:
        submodules.mamba_layer = mamba_layer()
    if mtp:
        from megatron.core.tensor_parallel import ColumnParallelLinear
        from megatron.core.transformer import multi_token_prediction as mtp_module

        layer = ModuleSpec(
            module=mtp_module.MultiTokenPredictionLayer,
            submodules=mtp_module.MultiTokenPredictionLayerSubmodules(
                enorm=Norm, hnorm=Norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=Norm
            ),
        )
        submodules.mtp_block_spec = ModuleSpec(
            module=mtp_module.MultiTokenPredictionBlock,
            submodules=mtp_module.MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
        )
    return ModuleSpec(module=getattr(stack, name), submodules=submodules)


def engine_hybrid_spec():
    """Megatron's own stack, which is of Transformer Engine's layers."""
    specs = either("models.hybrid.hybrid_layer_specs", "models.mamba.mamba_layer_specs")
    return getattr(specs, "hybrid_stack_spec", None) or specs.mamba_stack_spec


def hybrid_has_mtp() -> bool:
    models, _ = hybrid_home()
    kind = getattr(models, "HybridModel", None) or models.MambaModel
    return "hybrid_layer_pattern" in inspect.signature(kind.__init__).parameters


def tiny_hybrid(**overrides):
    (model,) = tiny_hybrid_chunks(**overrides)
    return model


def tiny_hybrid_chunks(
    *,
    tied: bool = True,
    ours: bool = False,
    our_attention: bool = False,
    pattern=PATTERN,
    change_spec=None,
    **overrides,
):
    """This rank's hybrid model, as a list of its chunks; every second MLP is experts where the config has some.

    `ours`: on our layer spec; `our_attention`: ours in Megatron's, for context parallelism. `pattern`: a letter
    for each layer, M for Mamba. `change_spec`: gives another spec for the one that the model would have.
    """
    from megatron.core import parallel_state

    models, stack = hybrid_home()
    kind = getattr(models, "HybridModel", None) or models.MambaModel
    parameters = inspect.signature(kind.__init__).parameters
    if "M" in pattern:
        overrides = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2} | overrides
    config = tiny_config(num_layers=len(pattern), **overrides)
    layers = "*-*E" if config.num_moe_experts else pattern
    virtual = config.virtual_pipeline_model_parallel_size
    stages = config.pipeline_model_parallel_size * (virtual or 1)
    if "hybrid_layer_pattern" in parameters:
        each = len(layers) // stages
        segments = "|".join(layers[i : i + each] for i in range(0, len(layers), each))
        sizes = {"hybrid_layer_pattern": segments + ("/*-" if config.mtp_num_layers else "")}
    elif config.mtp_num_layers:
        raise ValueError("this Megatron's hybrid model has no multi-token prediction")
    else:
        sizes = {"hybrid_override_pattern": layers}
    if virtual and "vp_stage" not in parameters:
        raise ValueError("this Megatron's hybrid model takes no vp_stage")
    if ours:
        from megatron_ext.megatron.hybrid_layer_specs import hybrid_stack_spec as spec
    else:
        spec = hybrid_spec(config, stack, bool(config.mtp_num_layers), our_attention, "M" in layers)
    spec = spec if change_spec is None else change_spec(spec)
    chunks = []
    for stage in range(virtual or 1):
        which = {"vp_stage": stage} if virtual else {}
        model = kind(
            config=config,
            vocab_size=VOCAB,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=not virtual, **which),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=not virtual, **which),
            **{"hybrid_stack_spec" if "hybrid_stack_spec" in parameters else "mamba_stack_spec": spec},
            **sizes,
            **which,
        )
        set_weights(model)
        chunks.append(model)
    return chunks


def tiny_bert(*, tied: bool = True, **overrides):
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    model = BertModel(
        tiny_config(**overrides),
        num_tokentypes=0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        add_binary_head=False,
        share_embeddings_and_output_weights=tied,
    )
    set_weights(model)
    return model


def tiny_t5(*, tied: bool = True, **overrides):
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec

    config = tiny_config(**overrides)
    model = T5Model(
        config=config,
        encoder_config=config,
        transformer_encoder_layer_spec=t5_block(encoder_model_with_local_spec(), config),
        transformer_decoder_layer_spec=t5_block(decoder_model_with_local_spec(), config),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
    )
    set_weights(model)
    return model


def t5_block(layer, config):
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megatron_ext.megatron.norms import Norm

    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=Norm)


def tiny_llava():
    """LLaVAModel; its image counts as one token of the text and as `PATCHES` of the language model."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLPSubmodules

    vision_spec = get_gpt_layer_local_spec()
    vision_spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    vision = tiny_config()
    vision.vision_model_type = "internvit"  # "clip" needs Transformer Engine's norm
    torch.manual_seed(0)
    return LLaVAModel(
        language_transformer_config=tiny_config(),
        language_transformer_layer_spec=get_gpt_layer_local_spec(),
        language_vocab_size=VOCAB,
        language_max_sequence_length=2 * SEQUENCE,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=vision_spec,
        drop_vision_class_token=True,
        vision_projection_config=tiny_config(),
        vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        language_position_embedding_type="rope",
        img_h=IMAGE,
        img_w=IMAGE,
        patch_dim=PATCH,
        image_token_index=LLAVA_IMAGE,
    )


def llava_step(model):
    """Losses `[B, S]`, and the mask that LLaVA makes of them, in one."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (2, SEQUENCE + 1), generator=generator)
    inputs = tokens[:, :-1].clone()
    inputs[:, 3] = LLAVA_IMAGE
    length = SEQUENCE - 1 + PATCHES
    loss, mask = model(
        torch.randn(2, 3, IMAGE, IMAGE, generator=generator),
        inputs,
        torch.arange(SEQUENCE).expand(2, SEQUENCE),
        torch.ones(length, length, dtype=torch.bool).triu(1)[None, None],
        labels=tokens[:, 1:],
        loss_mask=torch.ones(2, SEQUENCE),
    )
    assert loss.shape == mask.shape == (2, length)
    return loss * mask


class Patches(nn.Module):
    """An encoder of images, as a user of MIMO brings one: `[B, 3, height, width]` to `[B, patches, hidden]`."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.embed = nn.Conv2d(3, hidden_size, kernel_size=PATCH, stride=PATCH)

    def forward(self, images):
        return self.embed(images).flatten(2).transpose(1, 2)


def tiny_mimo():
    """MimoModel: a GPTModel, and a vision submodule with an encoder and a projection."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mimo.config import MimoModelConfig
    from megatron.core.models.mimo.model.base import MimoModel
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    config = tiny_config()
    torch.manual_seed(0)
    vision = ModuleSpec(
        module=VisionModalitySubmodules,
        submodules={
            "encoders": {"patches": ModuleSpec(module=Patches, params={"hidden_size": 12})},
            "input_projections": [
                ModuleSpec(module=nn.Linear, params={"in_features": 12, "out_features": config.hidden_size})
            ],
        },
    )
    language = {
        "config": config,
        "transformer_layer_spec": get_gpt_layer_local_spec(),
        "vocab_size": VOCAB,
        "max_sequence_length": SEQUENCE,
        "position_embedding_type": "rope",
    }
    return MimoModel(
        MimoModelConfig(
            language_model_spec=ModuleSpec(module=GPTModel, params=language),
            modality_submodules_spec={"images": vision},
            special_token_ids={"images": MIMO_IMAGE},
        )
    )


def mimo_step(model):
    """Losses `[B, S]`; each sample has an image."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB - 1, (2, SEQUENCE + 1), generator=generator)
    inputs = tokens[:, :-1].clone()
    inputs[:, 2 : 2 + PATCHES] = MIMO_IMAGE
    loss, _ = model(
        inputs,
        torch.arange(SEQUENCE).expand(2, SEQUENCE),
        torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None],
        labels=tokens[:, 1:],
        modality_inputs={"images": {"patches": {"images": torch.randn(2, 3, IMAGE, IMAGE, generator=generator)}}},
    )
    return loss
