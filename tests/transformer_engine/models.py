"""Tiny GPT models of Transformer Engine's layers."""


def te_spec(config, vp_stage: int | None = None):
    """Megatron's layers of Transformer Engine, for a config as `tests.gpt.tiny_config` makes it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
