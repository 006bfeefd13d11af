"""One call of `train` against one process: losses, clipped gradients and updated weights, in every layout."""

import pytest
import torch

from megatron_ext.policy import ClippedPGLoss, DPOLossFn, DTensorPolicyWorker, NLLLoss
from tests.marks import slow
from tests.policy.problems import (
    LAYOUTS,
    batching,
    counts_for,
    gradients_of_steps,
    largest_error,
    plain_log_probs,
    plain_model,
    plain_train,
    shard,
    tiny_batch,
    tiny_config,
    tiny_model,
    unchanged,
    whole,
)
from tests.ranks import ranks

TOLERANCE = 3e-5  # fp32 in another order; AdamW's root magnifies what is near 0
CUTS = [("fixed", 1), ("fixed", 2), ("fixed", 4), ("dynamic", 2), ("packed", 2)]
FEW = [("fixed", 2), ("packed", 2)]
GRPO = ClippedPGLoss(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)


def check(layout, cuts, loss_fn=GRPO, model=None, **batch):
    data = tiny_batch(**{"rows": 16} | batch)
    model = model or tiny_model()
    true = plain_train(tiny_config(model), data, loss_fn)
    for kind, rows in cuts:
        worker = DTensorPolicyWorker(
            tiny_config(model, **layout, **batching(kind), train_micro_batch_size=rows), init_reference_model=False
        )
        gradients = gradients_of_steps(worker)
        found = worker.train(shard(data, worker), loss_fn)
        case = f"{kind}, micro-batches of {rows}"

        def told(message, case=case):
            return f"{case}: {message}"

        torch.testing.assert_close(found["global_loss"].tolist(), true[0], rtol=1e-5, atol=1e-6, msg=told)
        torch.testing.assert_close(found["grad_norm"].tolist(), true[3], rtol=1e-4, atol=0.0, msg=told)
        assert largest_error(gradients, true[1]) < TOLERANCE, case
        assert largest_error(whole(worker.return_state_dict()), true[2]) < TOLERANCE, case
        assert all(parameter.grad is None for parameter in worker.model.parameters()), case  # whose memory is free


@ranks(1)
def test_one_rank():
    check({}, CUTS)


@pytest.mark.parametrize("layout, rows", [("tp", 4), *slow(("dp", 1), ("cp", 2))])
@ranks(2)
def test_two_ranks(layout, rows):
    """Every kind of micro-batches in every layout, dynamic ones with tensor parallel on four ranks."""
    check(LAYOUTS[layout], [("fixed", rows), ("packed", 2)] + [("dynamic", 2)] * (layout != "tp"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "tp_sp", "cp", "cp_tp_sp"])
@ranks(4)
def test_four_ranks(layout):
    """The layout, and data parallel by what it leaves of the ranks."""
    check(LAYOUTS[layout], [("dynamic", 2), ("packed", 2)] if layout == "tp" else FEW)


@pytest.mark.parametrize(
    "loss_fn", [DPOLossFn(sft_loss_weight=0.1), *slow(NLLLoss(), ClippedPGLoss(token_level_loss=False))]
)
@ranks(2)
def test_losses_add_up_over_ranks_and_micro_batches(loss_fn):
    check(LAYOUTS["dp"], [("fixed", 2), ("packed", 2)], loss_fn)


@pytest.mark.parametrize("tp", [1, *slow(2)])
@ranks(2)
def test_tied_embeddings(tp):
    check({"tp": tp}, [("fixed", 2)], NLLLoss(), tiny_model(tie_word_embeddings=True), rows=24)


@ranks(2)
def test_eval_mode_gives_the_loss_and_changes_nothing():
    data = tiny_batch()
    worker = DTensorPolicyWorker(tiny_config())
    mine = shard(data, worker)
    with unchanged(worker):
        found = worker.train(mine, GRPO, eval_mode=True)
    assert found["grad_norm"] is None
    torch.testing.assert_close(found["global_loss"], worker.train(mine, GRPO)["global_loss"])


@ranks(1)
def test_weights_are_fp32_whatever_the_config_says():
    worker = DTensorPolicyWorker(tiny_config(tiny_model(dtype="bfloat16")), init_reference_model=False)
    assert {x.dtype for x in worker.return_state_dict().values()} == {torch.float32}


@ranks(2)
def test_metrics_are_those_of_the_global_batches():
    """Sums over micro-batches and ranks, and the extremes of all. A micro-batch of which no row counts has none."""
    data = tiny_batch(16)
    worker = DTensorPolicyWorker(tiny_config(train_micro_batch_size=1))
    mine = shard(data, worker)
    found = worker.train(mine, GRPO, eval_mode=True)
    metrics = found["all_mb_metrics"]
    assert {len(values) for values in metrics.values()} == {int(mine["sample_mask"].sum())}
    model, true = plain_model(tiny_model()), []
    with torch.no_grad():
        for batch in (data.get_batch(i, 8) for i in range(2)):
            true.append(GRPO(plain_log_probs(model, batch), batch, *counts_for(GRPO, batch))[1])
    sums = torch.tensor([sum(metrics["loss"]), sum(metrics["num_valid_samples"])])
    extremes = torch.tensor([max(metrics["probs_ratio_max"]), -min(metrics["probs_ratio_min"])])
    torch.distributed.all_reduce(sums)
    torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX)
    torch.testing.assert_close(sums[0], found["global_loss"].mean(), rtol=1e-5, atol=1e-6)
    assert sums[1] == data["sample_mask"].sum()
    wanted = [max(one["probs_ratio_max"] for one in true), -min(one["probs_ratio_min"] for one in true)]
    torch.testing.assert_close(extremes, torch.tensor([float(x) for x in wanted]), rtol=1e-4, atol=0.0)

    def without_metrics(*given):
        return GRPO(*given)[0], {}

    metrics = worker.train(mine, without_metrics, eval_mode=True)["all_mb_metrics"]
    assert metrics["num_valid_samples"] == [1.0] * len(mine["sample_mask"])  # as in NeMo-RL
