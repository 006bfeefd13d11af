"""Megatron's other language models, tiny and without Transformer Engine or mamba_ssm: hybrid, BERT, T5."""

import dataclasses
import importlib

import torch

from tests.gpt import SEQUENCE, VOCAB, set_weights, stock_spec, tiny_config

PATTERN = "*-*-"  # attention and MLP layers


def hybrid_home():
    """The modules of the hybrid model and of its stack: HybridModel since 0.18, MambaModel before."""
    for model, stack in (
        ("hybrid.hybrid_model", "models.hybrid.hybrid_block"),
        ("mamba.mamba_model", "ssm.mamba_block"),
    ):
        try:
            return importlib.import_module(f"megatron.core.models.{model}"), importlib.import_module(
                f"megatron.core.{stack}"
            )
        except ModuleNotFoundError:
            continue
    raise AssertionError("no hybrid model")


def hybrid_spec(config, stack, mtp: bool = False):
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer import identity_op
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_ext.megatron.norms import Norm

    local = stock_spec(config)
    local = local.layer_specs[0] if hasattr(local, "layer_specs") else local
    parts = local.submodules
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
    name = "HybridStack" if hasattr(stack, "HybridStack") else "MambaStack"
    submodules = getattr(stack, f"{name}Submodules")(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
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


def tiny_hybrid(*, tied: bool = True, mtp: bool = False, **overrides):
    """A hybrid model of attention and MLP layers."""
    models, stack = hybrid_home()
    kind = getattr(models, "HybridModel", None) or models.MambaModel
    parameters = kind.__init__.__code__.co_varnames
    pattern = {"hybrid_layer_pattern": PATTERN + ("/*-" if mtp else "")}
    if "hybrid_layer_pattern" not in parameters:
        pattern = {"hybrid_override_pattern": PATTERN, "hybrid_attention_ratio": 0.5, "hybrid_mlp_ratio": 0.5}
    config = tiny_config(num_layers=len(PATTERN), **overrides | ({"mtp_num_layers": 1} if mtp else {}))
    spec = "hybrid_stack_spec" if "hybrid_stack_spec" in parameters else "mamba_stack_spec"
    model = kind(
        config=config,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        **pattern,
        **{spec: hybrid_spec(config, stack, mtp)},
    )
    set_weights(model)
    return model


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


def bert_arguments(tokens):
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def t5_arguments(tokens):
    size, seq = tokens.shape
    every = torch.ones(size, seq, seq, dtype=torch.bool)
    return {
        "encoder_input_ids": tokens,
        "decoder_input_ids": tokens.flip(1),
        "encoder_attn_mask": ~every,
        "decoder_attn_mask": every.triu(1),
        "encoder_decoder_attn_mask": ~every,
    }
