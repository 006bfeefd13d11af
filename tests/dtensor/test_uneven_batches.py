"""The loop of docs/fsdp2.md with accumulation, where other tokens count on each rank and in each step."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_ext.dtensor import causal_lm_loss, parallelize, use_fused_loss
from tests.dtensor.models import check_gradients, drawn, error, make
from tests.ranks import ranks

STEPS = 2


def batch_of(rank, step):
    ids = drawn(2, 24)[:, 3 * step : 4 * step + 9 + 4 * rank]
    labels = ids.clone()
    labels[0, : 3 + 2 * rank] = -100
    if rank and step:
        labels[1] = -100
    return ids, labels


def tokens_that_count(step):
    return sum((batch_of(rank, step)[1][:, 1:] != -100).sum() for rank in range(2))


def expected_of(model):
    """The loss and the gradients of one process, the mean of each step over the tokens of both ranks."""
    total = 0
    for rank, step in ((rank, step) for rank in range(2) for step in range(STEPS)):
        ids, labels = batch_of(rank, step)
        losses = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        total = total + losses / tokens_that_count(step) / STEPS
    total.backward()
    return total.detach(), {name: x.grad for name, x in model.named_parameters()}


@pytest.mark.parametrize("way", ["parallelize", "fully_shard"])
@ranks(2)
def test_uneven_batches_have_the_mean_of_all_tokens(way):
    expected, true = expected_of(make("llama"))
    model = make("llama")
    if way == "parallelize":
        model = parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dtype=torch.float32)
    else:
        for layer in (*model.model.layers, use_fused_loss(model)):
            fully_shard(layer)
    found = torch.zeros(())
    for step in range(STEPS):
        model.set_requires_gradient_sync(step == STEPS - 1)
        (ids, labels), count = batch_of(dist.get_rank(), step), tokens_that_count(step) / 2
        if way == "parallelize":
            loss = causal_lm_loss(model, ids, labels=labels).sum() / count
        else:
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=count).loss
        (loss / STEPS).backward()
        found += loss.detach() / STEPS / 2
    dist.all_reduce(found)
    assert error(found, expected) < 3e-6
    check_gradients(model, true)
