"""Log-probabilities against one process's logits, in every layout and for every way of cutting the batch."""

import pytest
import torch

from megatron_ext.policy import BatchedDataDict, DTensorPolicyWorker, NLLLoss
from tests.policy.problems import (
    LAYOUTS,
    batching,
    plain_log_probs,
    plain_model,
    shard,
    tiny_batch,
    tiny_config,
    tiny_model,
)
from tests.ranks import ranks


def gathered(worker, found):
    """The rows of all data-parallel ranks, in order."""
    parts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, found)
    return BatchedDataDict.from_batches(parts[:: len(parts) // worker.dp_size])


@torch.no_grad()
def check(layout, temperature=1.0):
    data = tiny_batch()
    true_BS = plain_log_probs(plain_model(tiny_model()), data, temperature)
    for kind in ("fixed", "dynamic", "packed"):
        config = tiny_config(**layout, **batching(kind), generation={"temperature": temperature})
        worker = DTensorPolicyWorker(config, init_optimizer=False, init_reference_model=False)
        found_BS = gathered(worker, worker.get_logprobs(shard(data, worker), micro_batch_size=3))["logprobs"]
        assert found_BS.dtype == torch.float32
        torch.testing.assert_close(found_BS, true_BS, rtol=2e-5, atol=2e-5, msg=lambda text, k=kind: f"{k}: {text}")


@ranks(1)
def test_one_rank_with_temperature():
    check({}, temperature=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "tp_sp", "cp"])
@ranks(2)
def test_two_ranks(layout):
    check(LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}], ids=["dp_tp", "dp_cp", "cp_tp"])
@ranks(4)
def test_four_ranks(layout):
    check(layout)


@pytest.mark.slow
@ranks(2)
def test_ranks_with_different_numbers_of_rows_step_together():
    whole = tiny_batch(7)
    data = whole.slice(0, 2) if torch.distributed.get_rank() == 0 else whole.slice(2, 7)
    worker = DTensorPolicyWorker(tiny_config(), init_optimizer=False)
    found = gathered(worker, worker.get_logprobs(data, micro_batch_size=1))["logprobs"]
    with torch.no_grad():
        true = plain_log_probs(plain_model(tiny_model()), whole)
    torch.testing.assert_close(found, true, rtol=2e-5, atol=2e-5)


@ranks(2)
def test_the_reference_policy_keeps_the_first_weights():
    """The trained ones are back after its scores, after an error, and after scores of its own inside of it."""
    worker = DTensorPolicyWorker(tiny_config())
    data = shard(tiny_batch(), worker)
    before = worker.get_logprobs(data)["logprobs"]
    worker.train(data, NLLLoss())
    trained = worker.get_logprobs(data)["logprobs"]
    assert not torch.equal(trained, before)
    assert torch.equal(worker.get_reference_policy_logprobs(data)["reference_logprobs"], before)
    assert torch.equal(worker.get_logprobs(data)["logprobs"], trained)
    with pytest.raises(KeyError), worker.use_reference_model():
        raise KeyError
    assert torch.equal(worker.get_logprobs(data)["logprobs"], trained)
    with worker.use_reference_model():
        assert torch.equal(worker.get_reference_policy_logprobs(data)["reference_logprobs"], before)
        assert torch.equal(worker.get_logprobs(data)["logprobs"], before)
        worker.train(data, NLLLoss(), eval_mode=True)
        for act in (
            lambda: worker.train(data, NLLLoss()),
            lambda: worker.save_checkpoint("/nowhere"),
            lambda: worker.load_checkpoint("/nowhere"),
            lambda: worker.get_weights_ipc_handles([]),
            worker.broadcast_weights_for_collective,
        ):
            with pytest.raises(ValueError, match=r"\(\) inside use_reference_model\(\)"):
                act()
    assert torch.equal(worker.get_logprobs(data)["logprobs"], trained)
    worker.train(data, NLLLoss())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@ranks(2)
def test_low_precision_rounds_no_more_than_a_plain_model(precision):
    data = tiny_batch()
    dtype = getattr(torch, precision)
    with torch.no_grad():
        true = plain_log_probs(plain_model(tiny_model()), data)
        plain = plain_log_probs(plain_model(tiny_model()).to(dtype), data).float()
    worker = DTensorPolicyWorker(tiny_config(precision=precision))
    found = gathered(worker, worker.get_logprobs(shard(data, worker)))["logprobs"]
    assert (found - true).norm() <= 1.5 * (plain - true).norm()
    assert (found - true).norm() > 0
    # Master weights, cut again after the passes.
    assert all(p.dtype == torch.float32 for p in worker.model.parameters())
