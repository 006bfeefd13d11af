"""Messages of the head, the layers and refit: waited for where they are used, and kept until then.

Each of them runs twice: as it is, and with its waits left out, which the checker has to see.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_ext import head, linear_cross_entropy
from megatron_ext.distributed.group_between_jobs import JobsGroup
from megatron_ext.policy.refit.weight_transfer import receive_weights, send_weights
from megatron_ext.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.gpt import data_parallel, model_parallel, ours_everywhere, run_schedule, stock_spec, tiny_batches, tiny_gpt
from tests.ranks import ranks
from tests.streams.memory import MemoryLog
from tests.streams.recording import Work, recording
from tests.tensor_parallel.sharded import Config, numbers, piece, symmetric_memory

T, D, V = 12, 8, 32  # V of both ranks


def hidden_and_weight(seed=1, part=False):
    hidden = numbers(T, D, seed=seed)
    return (piece(hidden, 0) if part else hidden).requires_grad_(), piece(
        numbers(V, D, seed=seed + 1), 0
    ).requires_grad_()


def loss(record, layout="replicated", **options):
    hidden, weight = hidden_and_weight(part=layout == "sequence")
    labels = torch.arange(T) * 2
    group = dist.group.WORLD
    with record():
        found = linear_cross_entropy(hidden, weight, labels, group, layout, cache=0.5, **options)
        found.sum().backward()


def read_outs(record, layout="replicated", of_logits=False):
    (hidden, weight), others = hidden_and_weight(part=layout == "sequence"), hidden_and_weight(3, layout == "sequence")
    labels, ids, group = torch.arange(T) * 2, torch.arange(2 * T).view(T, 2), dist.group.WORLD
    z, teachers = piece(numbers(T, V, seed=7), 1).requires_grad_(), piece(numbers(T, V, seed=8), 1)
    with record():
        if of_logits:
            lm_head, x, teacher = head.Logits(z, group), (), head.Logits(teachers, group)
        else:
            lm_head, x = head.LmHead(weight, group, layout), (hidden,)
            teacher = head.Teacher(head.LmHead(others[1].detach(), group, layout), others[0].detach())
        filters = [head.Sampled(labels, 3), head.Sampled(labels, 3, 0.8), head.Sampled(labels, top_p=0.7)]
        of_both = [head.KL(teacher), head.KL(teacher, "reverse"), head.JensenShannon(teacher)]
        sums = [
            head.CrossEntropy(labels),
            head.LogProbs(labels),
            head.IsArgmax(labels),
            head.Entropy(),
            head.ZLoss(),
            head.SumOfSquares(),
        ]
        found = lm_head.read(*x, *sums, head.Gather(ids), head.TopK(2), *filters, *of_both)
        flat = [part for one in found for part in (one if isinstance(one, tuple) else (one,))]
        sum(one.sum() for one in flat if one.requires_grad).backward()


def model(record, **overrides):
    """Collectives of the layers beside products: gradients of inputs and weights."""
    with model_parallel(tp=2), ours_everywhere():
        wrapped = data_parallel(tiny_gpt(stock_spec, **overrides))
        with record():
            run_schedule(wrapped, tiny_batches(batch=4)[0])


def deferred_weight_gradients(record):
    """Weight gradients of three micro-batches, of which one finds no room; each input is gathered under a product."""
    inputs, grads = [], []
    config = Config(sequence_parallel=True, defer_embedding_wgrad_compute=True, wgrad_deferral_limit=2)
    layer = ColumnParallelLinear(
        D,
        V,
        config=config,
        init_method=nn.init.normal_,
        bias=False,
        tp_group=dist.group.WORLD,
        embedding_activation_buffer=inputs,
        grad_output_buffer=grads,
    )
    with record():
        for step in range(3):
            x = piece(numbers(T, 1, D, seed=step), 0).requires_grad_()
            layer(x)[0].square().sum().backward()
        layer.backward_dw()
    assert inputs == grads == []


def through_symmetric_memory(record):
    """Products that are collectives, and the collectives beside them."""
    config = Config(sequence_parallel=True, tp_comm_overlap=True)
    options = {"config": config, "init_method": nn.init.normal_, "tp_group": dist.group.WORLD}
    with symmetric_memory():
        column = ColumnParallelLinear(D, V, gather_output=False, **options)
        row = RowParallelLinear(V, D, bias=True, input_is_parallel=True, skip_bias_add=False, **options)
        assert column.symmetric
        assert row.symmetric
        x = piece(numbers(T, 1, D, seed=1), 0).requires_grad_()
        with record():
            row(column(x)[0])[0].square().sum().backward()


def refit(record):

    class OverTheWorld:
        def broadcast(self, tensors, options):
            return dist.broadcast(tensors[0], options.rootRank, async_op=True)

    group = object.__new__(JobsGroup)
    group.device, group._group = torch.device("cpu"), OverTheWorld()
    group.differing = lambda facts: []
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    info = {name: (x.shape, x.dtype) for name, x in plain.state_dict().items()}
    with record():
        if dist.get_rank() == 0:
            send_weights(plain.state_dict().items(), info, group, 256)
        else:
            receive_weights(plain, group, info, 256)


WAYS = {
    "loss": loss,
    "loss-sequence": lambda record: loss(record, "sequence"),
    "loss-bits": lambda record: loss(record, bits="tensor_parallel"),
    "loss-bits-sequence": lambda record: loss(record, "sequence", bits="tensor_parallel"),
    "read-outs": read_outs,
    "read-outs-sequence": lambda record: read_outs(record, "sequence"),
    "read-outs-of-logits": lambda record: read_outs(record, of_logits=True),
    "layers": model,
    "layers-sequence": lambda record: model(record, sequence_parallel=True),
    "deferred": deferred_weight_gradients,
    "symmetric-memory": through_symmetric_memory,
    "refit": refit,
}


def faults_of(way) -> list[str]:
    logs = []

    @contextmanager
    def record():
        with recording(MemoryLog(real=True)) as log:
            logs.append(log)
            yield

    way(record)
    assert any(one.message for one in logs[0].submissions)
    return logs[0].faults


def only_the_host_waits(work, *_):
    """Wait as gloo does and NCCL does not: the host waits, and the stream does not."""
    work.log.aside(work.real.wait)
    work.log.waited(work.at)
    return True


# What the others show too, in another layout or with bits that are fixed.
LONG = (
    "loss-sequence",
    "loss-bits",
    "layers-sequence",
    "loss-bits-sequence",
    "read-outs-sequence",
    "read-outs-of-logits",
)


@ranks(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in WAYS])
def test_what_is_sent_is_waited_for(name):
    found = faults_of(WAYS[name])
    assert not found, "\n".join(sorted(set(found)))
    with mock.patch.object(Work, "wait", only_the_host_waits):
        assert faults_of(WAYS[name])
