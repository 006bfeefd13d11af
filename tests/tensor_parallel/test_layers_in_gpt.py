"""Our layers in Megatron's GPTModel, its schedules and its data parallelism: the numbers of Megatron's own layers."""

from contextlib import nullcontext

import pytest
import torch

from megatron_ext.megatron.layer_specs import gpt_block_spec
from tests.gpt import EXPERTS, loss_and_grads, model_parallel, ours_everywhere, stock_spec, tiny_batches, tiny_gpt
from tests.ranks import ranks
from tests.tensor_parallel.test_gpt_parity import SEQUENCE, check

pytestmark = pytest.mark.slow

FUSED = {"gradient_accumulation_fusion": True, "tied": False}
DEFERRED = FUSED | {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 0}


@ranks(4)
def test_experts_that_are_cut_in_two():
    """Expert parallel 2 in tensor parallel 2 with sequence parallelism.

    Megatron's own are compared whole: cut, they gather uneven numbers of tokens, which its mappings cannot over gloo.
    """
    options = EXPERTS | SEQUENCE | {"moe_ffn_hidden_size": 32}
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


@ranks(2)
@pytest.mark.parametrize(
    "sizes, options",
    [
        ({"pp": 2}, DEFERRED),
        ({"pp": 2}, DEFERRED | {"wgrad_deferral_limit": 1, "tied": True}),
        ({"pp": 2, "vp": 2}, DEFERRED | {"num_layers": 4}),
        ({"tp": 2}, FUSED | SEQUENCE),
    ],
    ids=str,
)
def test_gradients_fused_into_main_grad(sizes, options):
    """Without Apex. With pipeline stages the output layer's are deferred too, and Megatron's schedule has ours compute
    them (its own needs Apex)."""
    check(sizes, **options)
