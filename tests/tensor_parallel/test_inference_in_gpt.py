"""The inference layers in Megatron's GPTModel, which hands residuals and norms from layer to layer."""

import copy

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.megatron.layer_specs import gpt_block_spec
from megatron_ext.tensor_parallel import InferenceLayerNormColumnParallelLinear as Column
from megatron_ext.tensor_parallel import InferenceRowParallelLinear as Row
from tests.gpt import SEQUENCE, causal_mask, grouped, tiny_batches, tiny_gpt
from tests.marks import slow

LAYERS = 2


def inference_spec(config, vp_stage=None):
    """Our spec with the norms inside the linear layers that follow them."""
    block = copy.deepcopy(gpt_block_spec(config, vp_stage))
    for layer in block.layer_specs:
        parts = layer.submodules
        attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        attention.linear_qkv, attention.linear_proj = Column, Row
        mlp.linear_fc1, mlp.linear_fc2 = Column, Row
    return block


@torch.no_grad()
def logits(spec, **options):
    (model,) = tiny_gpt(spec, num_layers=LAYERS, normalization="RMSNorm", add_bias_linear=False, **options)
    tokens_BS = tiny_batches()[0][:, :-1]
    positions = torch.arange(SEQUENCE).expand_as(tokens_BS)
    model.eval()
    with count_collectives() as counts:
        return model(tokens_BS, positions, causal_mask(SEQUENCE)), sum(counts.values())


@grouped(1, 2)
@pytest.mark.parametrize("fused", [True, *slow(False)])
def test_logits_of_plain_layers(fused):
    size = torch.distributed.get_world_size()
    options = {"sequence_parallel": size > 1}
    plain, sent = logits(gpt_block_spec, **options)
    inference = {"transformer_impl": "inference_optimized", "inference_fuse_tp_communication": fused}
    found, sent_too = logits(inference_spec, **options, **inference)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    assert sent_too == sent
