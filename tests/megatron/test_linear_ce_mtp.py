"""Multi-token prediction under the fused head: losses, acceptance counts and gradients as stock's, and no logits."""

from functools import partial

import pytest
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_ext.megatron.fused_loss.model_methods import takes_losses_without_labels
from tests.gpt import grouped
from tests.megatron.language_models import hybrid_has_mtp, tiny_hybrid
from tests.megatron.patching import (
    SEQ,
    assert_fused_is_stock,
    assert_same,
    batch,
    counting_logits,
    grads_of,
    one_gpt,
    patched,
    run,
)

BUILDS = {"gpt": partial(one_gpt, mtp_num_layers=2), "hybrid": partial(tiny_hybrid, mtp_num_layers=1)}


def logged() -> dict:
    """Return Megatron's log of multi-token prediction, and clear it for the next step."""
    tracker = MTPLossLoggingHelper.tracker
    found = {name: value.clone() for name, value in tracker.items() if isinstance(value, torch.Tensor)}
    tracker.clear()
    return found


def compare(model, labels) -> None:
    mask = torch.ones(2, SEQ)
    mask[0, 3:] = 0
    logs, counts = [], []

    def step(model):
        loss = run(model, labels, loss_mask=mask)
        logs.append(logged())
        counts.append(len(made))
        return loss

    with counting_logits(model.output_layer) as made:
        found = assert_fused_is_stock(model, step, mask)
    assert counts[0] == len(made) > 0, "only stock makes logits"
    assert not logged(), "backward logs nothing"
    layers = [grad for name, grad in found.items() if name.startswith("mtp.") and "bias" not in name]
    assert layers
    assert all(grad.any() for grad in layers)
    expected_log, found_log = logs
    assert expected_log
    assert expected_log.get("correct_values", torch.ones(1)).any()  # labels that count
    torch.testing.assert_close(found_log, expected_log, rtol=1e-6, atol=0)


def likeliest_one_further(model):
    """Labels of which some are what the layers of multi-token prediction find likeliest, so that hits are counted."""
    _, labels, _ = batch()
    hits = []
    layer = model.output_layer
    with torch.no_grad(), layer.register_forward_hook(lambda module, args, out: hits.append(out[0].detach())):
        run(model, labels, loss_mask=torch.ones(2, SEQ))
    logged()
    labels = labels.clone()
    logits = gather_from_tensor_model_parallel_region(hits[0])
    labels[:, 1:4] = logits.argmax(-1).transpose(0, 1)[:, :3]  # the first layer looks one further
    return labels


@grouped(1, 2)
@pytest.mark.parametrize("build", BUILDS)
def test_acceptance_counts(build):
    if build == "hybrid" and not hybrid_has_mtp():
        pytest.skip("hybrid models have no multi-token prediction before Megatron-Core 0.17")
    for sequence_parallel in (False, True)[: torch.distributed.get_world_size()]:
        model = BUILDS[build](sequence_parallel=sequence_parallel)
        compare(model, likeliest_one_further(model))


@grouped(2)
def test_without_labels_the_layers_train_on_tokens():
    model = BUILDS["gpt"]()
    if not takes_losses_without_labels(model):
        pytest.skip("before Megatron-Core 0.19 multi-token prediction takes no loss without labels")
    stock = run(model)
    weights = torch.rand_like(stock)
    expected, expected_log = grads_of(model, stock, weights), logged()
    with patched(chunk_size=3), counting_logits(model.output_layer) as made:
        logits = run(model)
        found, found_log = grads_of(model, logits, weights), logged()
    assert type(logits) is torch.Tensor
    assert len(made) == 1
    torch.testing.assert_close(logits, stock, rtol=1e-6, atol=1e-6)
    assert_same(found, expected)
    torch.testing.assert_close(found_log, expected_log, rtol=1e-6, atol=0)
