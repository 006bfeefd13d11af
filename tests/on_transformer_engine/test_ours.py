"""Our head, layers and spec beside Transformer Engine's layers: as stock Megatron on them, in losses and gradients."""

from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.distributed as dist

from tests.gpt import model_parallel, ours_everywhere, tiny_batches
from tests.marks import slow
from tests.megatron.patching import patched, unpatch
from tests.on_transformer_engine.models import ENGINE, assert_same_steps, losses_and_norms, our_spec, te_spec
from tests.on_transformer_engine.test_experts import FUSED, MOE
from tests.on_transformer_engine.test_fp8 import SIZES
from tests.ranks import ranks

HEAD = {"chunk_tokens": 5}
WAYS = ("substitution", "patch", "both", "spec")


def beside_spec(config, vp_stage=None):
    """Our linear layers beside Transformer Engine's norms and attention, and our head."""
    from megatron_ext.megatron.spec_head import with_fused_head

    return with_fused_head(our_spec(config, vp_stage, transformer_engine=True), **HEAD)


@contextmanager
def in_the_way(way):
    """Nothing of ours ("stock"), our layers in Megatron's place, the head patched in, both, or what the spec says."""
    from megatron_ext.megatron.fusion_report import fusion_report, reset_fusion_report

    with ExitStack() as undo:
        if way in ("substitution", "both"):
            undo.enter_context(ours_everywhere())
        if way in ("patch", "both"):
            undo.enter_context(patched(**HEAD))
        undo.callback(unpatch)  # a spec patches the classes too
        reset_fusion_report()
        yield
        if way in ("patch", "both", "spec"):
            counts = torch.tensor([fusion_report().losses_fused, fusion_report().logits_made])
            dist.all_reduce(counts)  # the first stage of a pipeline has no losses
            assert counts[0] > 0
            assert counts[1] == 0


def trained(way, batches, **overrides):
    with in_the_way(way):
        return losses_and_norms(beside_spec if way == "spec" else te_spec, batches, **ENGINE | overrides)


def assert_ours_is_stock(sizes, ways=WAYS, **overrides):
    batches = tiny_batches(3)
    with model_parallel(**sizes):
        stock = trained("stock", batches, **overrides)
        for way in ways:
            assert_same_steps(trained(way, batches, **overrides), stock)


@pytest.mark.slow
@ranks(1)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tied": False, "gradient_accumulation_fusion": True, "qk_layernorm": True},
        {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
        MOE | FUSED,
    ],
    ids=["tied", "accumulation", "te-loss", "moe"],
)
def test_one_rank(overrides):
    assert_ours_is_stock({}, **overrides)


@ranks(2)
@pytest.mark.parametrize(
    "sizes,ways,overrides",
    [
        ({"tp": 2}, ("both", "spec"), {"sequence_parallel": True, "tied": False}),
        *slow(({"pp": 2}, WAYS, {}), ({"cp": 2}, WAYS, {}), ({"ep": 2}, WAYS, MOE | FUSED)),
    ],
    ids=["tp2-sp", "pp2", "cp2", "ep2"],
)
def test_two_ranks(sizes, ways, overrides):
    assert_ours_is_stock(sizes, ways, **overrides)


@pytest.mark.essential
@ranks(1)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_the_head_keeps_its_operands_under_fp8(recipe):
    """The layers are quantised, the output layer is not: stock's loss to the accuracy of fp32."""
    fp8 = {"fp8": "hybrid", "fp8_recipe": recipe, **SIZES}
    batches = tiny_batches(1, batch=8, seq=16)
    with model_parallel():
        stock = trained("stock", batches, **fp8)
        exact = trained("stock", batches, **SIZES)
        assert_same_steps(trained("patch", batches, **fp8), stock, norms=1e-4)
    assert (stock[0] - exact[0]).abs().max() > 1e-4, "fp8 is on"


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_stages_of_a_pipeline_share_the_vocabulary(tied):
    pytest.importorskip("greenlet")
    from megatron_ext.experimental import pipeline_vocabulary

    batches = tiny_batches(3)
    with model_parallel(pp=2):
        stock = trained("stock", batches, tied=tied)
        pipeline_vocabulary.share_vocabulary()
        try:
            shared = losses_and_norms(te_spec, batches, tied=tied, **ENGINE)
        finally:
            pipeline_vocabulary.restore()
    assert_same_steps(shared, stock)
