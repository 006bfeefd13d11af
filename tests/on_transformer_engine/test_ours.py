"""Our head, layers and spec beside Transformer Engine's layers: as stock Megatron on them, in losses and gradients."""

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from tests.gpt import model_parallel, ours_everywhere, tiny_batches
from tests.on_transformer_engine.models import ENGINE, assert_same_steps, losses_and_norms, te_spec
from tests.on_transformer_engine.test_experts import FUSED, MOE
from tests.ranks import ranks


def trained(way, batches, **overrides):
    """Steps with nothing of ours ("stock"), our layers in Megatron's place, the head in its forward, or both."""
    from megatron_ext.megatron.fusion_report import fusion_report, reset_fusion_report
    from megatron_ext.megatron.linear_ce import patch_gpt_model_forward_for_linear_ce_fusion as patch
    from megatron_ext.megatron.linear_ce import unpatch_gpt_model_forward_for_linear_ce_fusion as unpatch

    with ExitStack() as undo:
        if way in ("substitution", "both"):
            undo.enter_context(ours_everywhere())
        if way in ("patch", "both"):
            patch(chunk_size=5)
            undo.callback(unpatch)
            reset_fusion_report()
        steps = losses_and_norms(te_spec, batches, **ENGINE | overrides)
        if way in ("patch", "both"):
            counts = torch.tensor([fusion_report().losses_fused, fusion_report().logits_made])
            dist.all_reduce(counts)  # the first stage of a pipeline has no losses
            assert counts[0] > 0
            assert counts[1] == 0
    return steps


def assert_ours_is_stock(sizes, **overrides):
    batches = tiny_batches(3)
    with model_parallel(**sizes):
        stock = trained("stock", batches, **overrides)
        for way in ("substitution", "patch", "both"):
            assert_same_steps(trained(way, batches, **overrides), stock)


@pytest.mark.slow
@ranks(1)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tied": False, "gradient_accumulation_fusion": True},
        {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
        MOE | FUSED,
    ],
    ids=["tied", "accumulation", "te-loss", "moe"],
)
def test_one_rank(overrides):
    assert_ours_is_stock({}, **overrides)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize(
    "sizes,overrides",
    [
        ({"tp": 2}, {"sequence_parallel": True, "tied": False}),
        ({"pp": 2}, {}),
        ({"cp": 2}, {}),
        ({"ep": 2}, MOE | FUSED),
    ],
    ids=["tp2-sp", "pp2", "cp2", "ep2"],
)
def test_two_ranks(sizes, overrides):
    assert_ours_is_stock(sizes, **overrides)
