"""Experts whose exchanges overlap with other micro-batches, and weight gradients that are delayed until then."""

from contextlib import nullcontext

import pytest
import torch

from tests.gpt import model_parallel, run_schedule, tiny_batches, tiny_gpt
from tests.megatron.patching import patched
from tests.on_transformer_engine.models import ENGINE, te_spec
from tests.on_transformer_engine.test_experts import FUSED, MOE
from tests.ranks import ranks

BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}


def step(microbatches, model, return_schedule_plan=False):
    """Forward step as in Megatron's pretraining script: a micro-batch's plan is built where the schedule asks for
    it."""
    tokens_BS = next(microbatches)
    size, length = tokens_BS.shape[0], tokens_BS.shape[1] - 1
    call = model.build_schedule_plan if return_schedule_plan else model
    positions = torch.arange(length).expand(size, length)
    output = call(tokens_BS[:, :-1], positions, None, labels=tokens_BS[:, 1:])

    def loss(per_token_BS):
        mean = per_token_BS.float().mean()
        return mean, mean.detach().clone()

    return output, loss


def gradients(fused, **overrides):
    """The loss of a step of two micro-batches, and all gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from megatron_ext.megatron.fusion_report import fusion_report, reset_fusion_report

    with patched(chunk_size=5) if fused else nullcontext():
        reset_fusion_report()
        (model,) = tiny_gpt(te_spec, tied=False, **ENGINE | MOE | FUSED | BF16 | overrides)
        model.config.finalize_model_grads_func = finalize_model_grads
        settings = DistributedDataParallelConfig(delay_wgrad_compute=model.config.delay_wgrad_compute)
        wrapped = DistributedDataParallel(model.config, settings, model)
        wrapped.zero_grad_buffer()
        loss = run_schedule([wrapped], tiny_batches(batch=8)[0], step=step)
        if fused:
            assert fusion_report().losses_fused == 2
            assert fusion_report().logits_made == 0
    return loss, {name: parameter.main_grad.float() for name, parameter in model.named_parameters()}


@ranks(2)
@pytest.mark.parametrize(
    "accumulated", [pytest.param(False, marks=pytest.mark.slow), True], ids=["copied", "accumulated"]
)
def test_overlapped_and_delayed_is_plain(accumulated):
    plain = {"gradient_accumulation_fusion": accumulated}
    overlap = plain | {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    with model_parallel(ep=2):
        for fused in (False, True):
            expected_loss, expected = gradients(fused, **plain)
            loss, found = gradients(fused, **overlap)
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            for name, grad in expected.items():
                assert (found[name] - grad).norm() < 1e-6 * grad.norm(), name
