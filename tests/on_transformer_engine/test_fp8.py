"""FP8 under Megatron: `fp8="hybrid"` with each of Transformer Engine's recipes trains, with the error of the format."""

from contextlib import nullcontext

import pytest
import torch

from tests.gpt import EXPERTS, model_parallel, tiny_batches
from tests.marks import quick_if
from tests.on_transformer_engine.models import ENGINE, losses_and_norms, te_spec
from tests.ranks import ranks
from tests.tensor_parallel.sharded import no_tracker

# Sizes that FP8 asks for: multiples of 128 for blocks, of 32 for MXFP8.
SIZES = {"hidden_size": 128, "ffn_hidden_size": 256, "num_layers": 1}
RECIPES = ["delayed", "tensorwise", "blockwise", "mxfp8"]


def trained(**overrides):
    return losses_and_norms(te_spec, tiny_batches(3, batch=8, seq=16), **ENGINE | SIZES | overrides)


def assert_recipe_trains(recipe, **overrides):
    with model_parallel():
        exact = trained(**overrides)
        rounded = trained(fp8="hybrid" if recipe != "mxfp8" else "e4m3", fp8_recipe=recipe, **overrides)
    error = ((rounded[:, 0] - exact[:, 0]) / exact[:, 0]).abs()
    assert 1e-6 < error.max() < 2e-2, error
    torch.testing.assert_close(rounded[:, 1], exact[:, 1], rtol=0.1, atol=0)


@ranks(1)
@pytest.mark.parametrize("recipe", quick_if(("delayed", "mxfp8").__contains__, RECIPES))
def test_recipes_train(recipe):
    assert_recipe_trains(recipe)


@ranks(1)
@pytest.mark.parametrize("recipe", quick_if(("delayed",).__contains__, RECIPES))
def test_recipes_train_grouped_experts(recipe):
    assert_recipe_trains(recipe, **EXPERTS, moe_grouped_gemm=True)


@pytest.mark.slow
@ranks(2)
def test_tensor_parallel():
    with model_parallel(tp=2):
        rounded = trained(fp8="hybrid", fp8_recipe="tensorwise", sequence_parallel=True)
        exact = trained(sequence_parallel=True)
    error = ((rounded[:, 0] - exact[:, 0]) / exact[:, 0]).abs()
    assert 1e-6 < error.max() < 2e-2, error


@ranks(1)
@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "DelayedScaling"])
@pytest.mark.parametrize("how", ["checkpoint", "without output"])
def test_recomputation_runs_in_the_autocast_of_the_forward(how, recipe):
    """The backward is called outside of it, as a training loop does; then once the other way round."""
    with model_parallel(), no_tracker():
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes

        from megatron_ext.tensor_parallel.random import CheckpointWithoutOutput, checkpoint

        def autocast():
            return te.fp8_autocast(enabled=True, fp8_recipe=getattr(recipes, recipe)())

        def gradients(recomputed, forward, backward):
            torch.manual_seed(3)
            layer = te.LayerNormLinear(64, 64, params_dtype=torch.float32)
            x = torch.randn(32, 64, requires_grad=True)
            for _ in range(2):  # the second one quantizes by the first one's amax
                with forward():
                    if recomputed and how == "checkpoint":
                        y = checkpoint(layer, False, x)
                    elif recomputed:
                        y = CheckpointWithoutOutput(fp8=None).checkpoint(layer, x)
                    else:
                        y = layer(x)
                    out = (y * y).sum()
                with backward():
                    out.backward()
            return [x.grad, *(parameter.grad for parameter in layer.parameters())]

        kept = gradients(False, autocast, nullcontext)
        exact = gradients(False, nullcontext, nullcontext)
        assert not torch.equal(kept[0], exact[0]), "there is FP8"
        torch.testing.assert_close(gradients(True, autocast, nullcontext), kept, rtol=0, atol=0)
        torch.testing.assert_close(gradients(True, nullcontext, autocast), exact, rtol=0, atol=0)
