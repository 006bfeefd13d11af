"""Options of the worker, each against one process: recomputation, offloading, a plan, a folder, low precision."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from megatron_ext.policy import DTensorPolicyWorker, NLLLoss
from megatron_ext.policy.worker.optimizer import GROWTH_STEPS, LossScale
from tests.policy.problems import (
    check_trains,
    counts_for,
    gradients_of_steps,
    held_by,
    plain_log_probs,
    plain_model,
    shard,
    tiny_batch,
    tiny_config,
    tiny_model,
    unchanged,
)
from tests.ranks import ranks, shared_folder

MLP_ALONE = {
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def check(worker):
    """Two global batches."""
    check_trains(worker, tiny_config(), tiny_batch(16), NLLLoss())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@ranks(2)
def test_activation_checkpointing(recompute):
    config = tiny_config(dtensor_cfg={"activation_checkpointing": recompute})
    worker = DTensorPolicyWorker(config)
    calls, layer = [], worker.model.model.layers[0]
    getattr(layer, "_checkpoint_wrapped_module", layer).mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    data = shard(tiny_batch(), worker)
    worker.train(data, NLLLoss(), eval_mode=True)
    once = len(calls)
    assert once > 0
    worker.train(data, NLLLoss())
    assert len(calls) == (3 if recompute else 2) * once
    check(DTensorPolicyWorker(config))


@pytest.mark.slow
@ranks(2)
def test_cpu_offload():
    worker = DTensorPolicyWorker(tiny_config(dtensor_cfg={"cpu_offload": True}))
    assert isinstance(worker.model._get_fsdp_state()._fsdp_param_group.offload_policy, CPUOffloadPolicy)
    check(worker)
    worker.prepare_for_lp_inference()
    worker.prepare_for_training()
    assert {p.device.type for p in worker.model.parameters()} == {"cpu"}
    assert {x.device.type for s in worker.optimizer.state.values() for x in s.values()} == {"cpu"}


@pytest.mark.slow
@ranks(2)
def test_custom_plan():
    plan = {"custom_parallel_plan": f"{__name__}.MLP_ALONE"}
    worker = DTensorPolicyWorker(tiny_config(tp=2, dtensor_cfg=plan))
    cut = {name for name, x in worker.return_state_dict().items() if x.to_local().shape != x.shape}
    assert cut == {f"model.layers.{i}.mlp.{name}_proj.weight" for i in range(2) for name in ("gate", "up", "down")}
    check(worker)


@pytest.mark.slow
@ranks(2)
def test_local_folder():
    folder = shared_folder()
    if dist.get_rank() == 0:
        plain_model(tiny_model()).save_pretrained(folder)
    dist.barrier()
    check(DTensorPolicyWorker(tiny_config(str(folder), tp=2, seed=99)))  # nothing is drawn


def plain_gradients(data, loss_fn, dtype=torch.float32, scale=1.0):
    """One process, all of it in `dtype`, with the loss scaled in between."""
    model = plain_model(tiny_model()).to(dtype)
    loss, _ = loss_fn(plain_log_probs(model, data).float(), data, *counts_for(loss_fn, data))
    (loss * scale).backward()
    return {name: p.grad.float() / scale for name, p in model.named_parameters()}


def distance(found, true):
    return float(sum((found[name] - x).square().sum() for name, x in true.items()).sqrt())


class Faint(NLLLoss):
    """Gradients that are 0 in fp16 unless they are scaled."""

    def __call__(self, *arguments):
        loss, metrics = super().__call__(*arguments)
        return 1e-7 * loss, metrics


@pytest.mark.slow
@pytest.mark.parametrize("precision, loss_fn", [("bfloat16", NLLLoss()), ("float16", NLLLoss()), ("float16", Faint())])
@ranks(2)
def test_low_precision_gradients_are_no_worse_than_a_plain_model(precision, loss_fn):
    """The error that rounding makes in one process is the measure."""
    data, dtype = tiny_batch(), getattr(torch, precision)
    scale = 2.0**14 if precision == "float16" else 1.0
    true = plain_gradients(data, loss_fn)
    plain = plain_gradients(data, loss_fn, dtype, scale)
    worker = DTensorPolicyWorker(tiny_config(precision=precision, max_grad_norm=None))
    found = gradients_of_steps(worker)
    worker.train(shard(data, worker), loss_fn)
    assert all(x.dtype == torch.float32 for x in found.values())
    assert 0 < distance(found, true) <= 1.05 * distance(plain, true)
    assert distance(plain, true) < 0.1 * distance(true, {name: torch.zeros_like(x) for name, x in true.items()})


@pytest.mark.slow
@ranks(2)
def test_too_large_loss_scale_is_halved_and_the_step_skipped():
    worker = DTensorPolicyWorker(tiny_config(precision="float16"))
    data = shard(tiny_batch(), worker)
    before = held_by(worker)
    worker.trainer.loss_scale.value = 2.0**40
    with unchanged(worker):
        result = worker.train(data, NLLLoss())
    assert not result["grad_norm"].isfinite().any()
    assert worker.trainer.loss_scale.value == 2.0**39
    worker.trainer.loss_scale.value = 2.0**13
    assert worker.train(data, NLLLoss())["grad_norm"].isfinite().all()
    folder = shared_folder()
    paths = str(folder / "weights"), str(folder / "optimizer")
    worker.save_checkpoint(*paths)
    other = DTensorPolicyWorker(tiny_config(precision="float16"), None, *paths)
    assert other.trainer.loss_scale.state_dict() == {"value": 2.0**13, "good_steps": 1}
    after = held_by(worker)
    assert any(not torch.equal(after[name], x) for name, x in before.items())


def test_the_loss_scale_grows_after_good_steps_and_stops_at_one():
    scale = LossScale(dynamic=True)
    assert not any(scale.overflowed(1.0) for _ in range(GROWTH_STEPS))
    assert scale.value == 2.0**15
    assert [scale.overflowed(float("inf")) for _ in range(16)] == [True] * 15 + [False]
    assert scale.state_dict()["good_steps"] == 0
    assert not LossScale(dynamic=False).overflowed(float("nan"))


def test_loss_scale_ignores_that_of_a_precision_without():
    scale, none, other = LossScale(dynamic=True), LossScale(dynamic=False), LossScale(dynamic=True)
    scale.load_state_dict(none.state_dict())
    assert scale.value == 2.0**14
    scale.value = 2.0**9
    none.load_state_dict(scale.state_dict())
    other.load_state_dict(scale.state_dict())
    assert (none.value, other.value) == (1, 2.0**9)
