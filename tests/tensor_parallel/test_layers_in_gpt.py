"""Our layers of experts and of inference in Megatron's GPTModel, beside Megatron's own and our plain ones."""

import copy
from contextlib import nullcontext

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.megatron.layer_specs import gpt_block_spec
from megatron_ext.tensor_parallel import InferenceLayerNormColumnParallelLinear as Column
from megatron_ext.tensor_parallel import InferenceRowParallelLinear as Row
from tests.gpt import (
    EXPERTS,
    causal_mask,
    grouped,
    loss_and_grads,
    model_parallel,
    ours_everywhere,
    stock_spec,
    tiny_batches,
    tiny_gpt,
)
from tests.marks import slow
from tests.ranks import ranks


@pytest.mark.slow
@ranks(4)
def test_experts_that_are_cut_in_two():
    """Expert parallel 2 in tensor parallel 2 with sequence parallelism.

    Megatron's own are compared whole: cut, they gather uneven numbers of tokens, which its mappings cannot over gloo.
    """
    options = EXPERTS | {"sequence_parallel": True, "moe_ffn_hidden_size": 32}
    results = []
    for place, pieces, spec in ((nullcontext, 1, stock_spec), (ours_everywhere, 2, gpt_block_spec)):
        with model_parallel(tp=2, ep=2, expert_tensor_parallel_size=pieces), place():
            chunks = tiny_gpt(spec, expert_tensor_parallel_size=pieces, **options)
            results.append(loss_and_grads(chunks, tiny_batches()[0]))
    (stock, stock_grads), (loss, grads) = results
    assert loss == pytest.approx(stock, rel=1e-6)
    assert grads.keys() == stock_grads.keys()
    assert any("experts" in name for name in grads)
    for name, grad in grads.items():
        if "experts" not in name:
            torch.testing.assert_close(grad, stock_grads[name], rtol=1e-4, atol=1e-6)


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
    (model,) = tiny_gpt(spec, num_layers=2, normalization="RMSNorm", add_bias_linear=False, **options)
    tokens_BS = tiny_batches()[0][:, :-1]
    positions = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    model.eval()
    with count_collectives() as counts:
        return model(tokens_BS, positions, causal_mask(tokens_BS.shape[1])), sum(counts.values())


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
