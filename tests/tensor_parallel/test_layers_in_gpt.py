"""Our layers in Megatron's GPTModel, its schedules and its data parallelism: the numbers of Megatron's own layers."""

from contextlib import nullcontext

import pytest
import torch

from tests.gpt import EXPERTS, loss_and_grads, model_parallel, ours_everywhere, stock_spec, tiny_batches, tiny_gpt
from tests.ranks import ranks

pytestmark = pytest.mark.slow


def run(ours, **options):
    """Loss and gradients of one global batch."""
    from megatron_ext.megatron.layer_specs import gpt_block_spec

    with ours_everywhere() if ours else nullcontext():
        return loss_and_grads(tiny_gpt(gpt_block_spec if ours else stock_spec, **options), tiny_batches()[0])


@ranks(4)
def test_experts():
    """Expert parallel 2 in tensor parallel 2 with sequence parallelism, experts whole and cut in two.

    Megatron's own are compared whole: cut, they gather uneven numbers of tokens, which its mappings cannot over gloo.
    """
    options = EXPERTS | {"moe_ffn_hidden_size": 32, "sequence_parallel": True}
    results = {}
    for ours, pieces in ((False, 1), (True, 1), (True, 2)):
        with model_parallel(tp=2, ep=2, expert_tensor_parallel_size=pieces):
            results[ours, pieces] = run(ours, expert_tensor_parallel_size=pieces, **options)
    stock, stock_grads = results.pop((False, 1))
    for (_, pieces), (loss, grads) in results.items():
        assert loss == pytest.approx(stock, rel=1e-6)
        assert grads.keys() == stock_grads.keys()
        assert any("experts" in name for name in grads)
        for name, grad in grads.items():
            if pieces == 1 or "experts" not in name:
                torch.testing.assert_close(grad, stock_grads[name], rtol=1e-4, atol=1e-6)


@ranks(2)
@pytest.mark.parametrize(
    "sizes,limit,tied",
    [
        ({"pp": 2}, 0, False),
        ({"pp": 2}, 1, True),
        ({"pp": 2, "vp": 2}, 0, False),
        ({"tp": 2}, 0, False),
    ],
    ids=str,
)
def test_gradients_fused_into_main_grad(sizes, limit, tied):
    """Without Apex: the same gradients as unfused ones. With pipeline stages the output layer's are deferred too, and
    Megatron's schedule has ours compute them (its own needs Apex)."""
    layers = 2 * sizes.get("vp", 1)
    with model_parallel(**sizes):
        fused = {"gradient_accumulation_fusion": True, "sequence_parallel": "tp" in sizes}
        if "pp" in sizes:
            fused.update(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=limit)
        loss, grads = run(True, tied=tied, num_layers=layers, sequence_parallel="tp" in sizes)
        fused_loss, fused_grads = run(True, tied=tied, num_layers=layers, **fused)
    assert fused_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(fused_grads, grads, rtol=1e-5, atol=1e-7)
    assert all(grad.any() for name, grad in fused_grads.items() if name.endswith("weight"))


@ranks(2)
def test_deferred_gradients_while_another_model_is_patched():
    """The patch guards Megatron's drain, and the guard finds ours whether it came before or after."""
    from megatron_ext.megatron.layer_specs import gpt_block_spec
    from megatron_ext.model_utils import (
        patch_gpt_model_forward_for_linear_ce_fusion as patch,
    )
    from megatron_ext.model_utils import (
        unpatch_gpt_model_forward_for_linear_ce_fusion as unpatch,
    )

    deferred = {"gradient_accumulation_fusion": True, "defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 0}
    with model_parallel(pp=2):
        loss, grads = run(True, tied=False)
        with ours_everywhere():
            other = tiny_gpt(gpt_block_spec, tied=False)
        patch(model=other)
        try:
            guarded_loss, guarded_grads = run(True, tied=False, **deferred)
        finally:
            unpatch(model=other)
    assert guarded_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(guarded_grads, grads, rtol=1e-5, atol=1e-7)
