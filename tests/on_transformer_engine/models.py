"""Tiny GPT models of Transformer Engine's layers, and what the tests compare."""

from contextlib import contextmanager

import torch

from tests.gpt import causal_mask, data_parallel, make_optimizer, model_parallel, tiny_batches, tiny_gpt, train_step

ENGINE = {"transformer_impl": "transformer_engine"}


def te_spec(config, vp_stage: int | None = None):
    """Megatron's layers of Transformer Engine, for a config as `tests.gpt.tiny_config` makes it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )


def our_spec(config, vp_stage: int | None = None, transformer_engine: bool = False):
    """Our layers, or our linear ones beside Transformer Engine's norms and attention."""
    from megatron_ext.megatron.layer_specs import gpt_block_spec

    return gpt_block_spec(config, vp_stage, transformer_engine=transformer_engine)


@contextmanager
def any_tracker(**sizes):
    """Megatron's groups; afterwards its own tracker again, whichever was in use."""
    with model_parallel(**sizes):
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        try:
            yield
        finally:
            model_parallel_cuda_manual_seed(11, te_rng_tracker=False, force_reset_rng=True)


def losses_and_norms(spec, batches, **overrides):
    """fp64 [steps, 2]: the loss of each step of training, and the norm of its gradients."""
    chunks = data_parallel(tiny_gpt(spec, engine=spec is te_spec, **overrides))
    optimizer = make_optimizer(chunks)
    return torch.tensor([train_step(chunks, optimizer, tokens_BS) for tokens_BS in batches], dtype=torch.float64)


def assert_same_steps(found, expected, losses=1e-6, norms=1e-5):
    torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=losses, atol=0)
    torch.testing.assert_close(found[:, 1], expected[:, 1], rtol=norms, atol=0)
    assert expected[0, 1] > 0.1


def assert_te_is_local(sizes, only_te=None, steps=3, **overrides):
    """Both specs train alike; `only_te` are settings that the local layers do not have."""
    batches = tiny_batches(steps)
    with model_parallel(**sizes):
        local = losses_and_norms(None, batches, **overrides)
        engine = losses_and_norms(te_spec, batches, **ENGINE | overrides | (only_te or {}))
    assert_same_steps(engine, local)


def plain_loss(model, tokens_BS):
    """The mean loss of one forward, no schedule around it."""
    length = tokens_BS.shape[1] - 1
    positions = torch.arange(length).expand(len(tokens_BS), length)
    return model(tokens_BS[:, :-1], positions, causal_mask(length), labels=tokens_BS[:, 1:]).mean()
