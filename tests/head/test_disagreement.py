"""Ranks that do not pass the same labels or options: told on every rank, in the exchange that the call makes anyway."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ext import (
    head,
    linear_cross_entropy,
    linear_log_probs,
    token_log_probs,
)
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.head.call import statistics
from tests.head.functions import OF_HIDDEN, OF_MADE_LOGITS, of_labels
from tests.ranks import ranks

T, D, V = 6, 4, 10
LABELS = "labels are not the same on every rank of tp_group"
OPTIONS = "options are not the same on every rank of tp_group"


def test_ranks_with_any_options_send_equally_many_rows():
    every = SimpleNamespace(mean=True, expected=True, hits=True, softcap=None)
    assert statistics.own_rows(every) == statistics.SENT


def parts():
    """Hidden states, this rank's weight and logits, and labels, of as many tokens as the ranks have together."""
    g, ranks_ = torch.Generator().manual_seed(0), dist.get_world_size()
    hidden, weight = torch.randn(ranks_ * T, D, generator=g), torch.randn(ranks_, V, D, generator=g)
    labels = torch.randint(ranks_ * V, (ranks_ * T,), generator=g)
    return hidden, weight[dist.get_rank()], labels


def cut(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


OF_LABELS = {name: call for name, (call, _) in of_labels(OF_HIDDEN, OF_MADE_LOGITS).items()} | {
    "skipped": partial(linear_cross_entropy, skip_ignored=True),
    "top-p by chunks": partial(OF_MADE_LOGITS["top-p of logits"], chunk_tokens=1),
}


@ranks(2, 4)
@pytest.mark.parametrize("name", OF_LABELS)
def test_hidden_states_and_labels_that_are_cut_already(name):
    """The usual mistake with sequence parallelism: own tokens on each rank, and the layout that means the same ones."""
    hidden, weight, labels = parts()
    with count_collectives() as right:
        OF_LABELS[name](hidden, weight, labels, tp_group=dist.group.WORLD)
    with count_collectives() as counts, pytest.raises(ValueError, match=LABELS):
        OF_LABELS[name](cut(hidden), weight, cut(labels), tp_group=dist.group.WORLD)
    assert counts.total() <= right.total(), "no exchange of its own"
    assert OF_LABELS[name](hidden, weight, labels, tp_group=dist.group.WORLD).isfinite().any()


@ranks(2)
@pytest.mark.parametrize("skip_ignored", [False, True])
def test_other_tokens_that_count(skip_ignored):
    """A mask of one rank, and a batch in which nothing counts there: with skip_ignored its shapes are others."""
    hidden, weight, labels = parts()
    group, masks = dist.group.WORLD, []
    for column in range(2):
        mask = torch.ones(labels.shape)
        mask[column :: 1 + column] = 0
        masks.append(mask)
    for mask in masks:
        own = torch.ones(labels.shape) if dist.get_rank() else mask
        with count_collectives() as counts, pytest.raises(ValueError, match=LABELS):
            linear_cross_entropy(hidden, weight, labels, group, loss_mask=own, skip_ignored=skip_ignored)
        assert counts.total() == 1
        linear_cross_entropy(hidden, weight, labels, group, loss_mask=mask, skip_ignored=skip_ignored)


@ranks(2)
def test_labels_in_another_order_of_memory():
    _, weight, _ = parts()
    g = torch.Generator().manual_seed(1)
    hidden, labels = torch.randn(3, 4, D, generator=g), torch.randint(2 * V, (3, 4), generator=g)
    z = hidden @ weight.t()
    found = linear_log_probs(hidden, weight, labels, dist.group.WORLD)
    own = labels.t().contiguous().t() if dist.get_rank() else labels
    torch.testing.assert_close(token_log_probs(z, own, dist.group.WORLD), found)
    with pytest.raises(ValueError, match=LABELS):
        token_log_probs(z, labels.roll(dist.get_rank(), 1), dist.group.WORLD)


OF_OPTIONS = [
    {"label_smoothing": 0.1},
    {"z_loss": 0.1},
    {"softcap": 3.0},
    {"temperature": 0.5},
    {"return_entropy": True},
    {"return_hits": True},
    {"return_entropy": True, "return_hits": True, "softcap": 3.0},
    {"label_smoothing": 0.1, "softcap": 3.0},
    {"ignore_index": -1},
]


@ranks(2, 4)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_an_option_of_one_rank(layout):
    """Options with another number of statistics once ended the process; others gave wrong results."""
    hidden, weight, labels = parts()
    hidden = cut(hidden) if layout == "sequence" else hidden
    for chosen in OF_OPTIONS:
        own = chosen if dist.get_rank() == 1 else {}
        calls = [linear_cross_entropy] if {"label_smoothing", "z_loss"} & chosen.keys() else [linear_log_probs]
        for call in [linear_cross_entropy, linear_log_probs] if {"softcap"} == chosen.keys() else calls:
            with count_collectives() as counts, pytest.raises(ValueError, match=OPTIONS):
                call(hidden, weight, labels, dist.group.WORLD, layout, **own)
            assert counts.total() == (1 if layout == "replicated" else 2), "no exchange of its own"
            call(hidden, weight, labels, dist.group.WORLD, layout, **chosen)


def sampled(x, w, ids, top_k=None, top_p=1.0, **of):
    return head.linear_sampled_log_probs(x, w, ids[:, 0], top_k, top_p, **of)


def jensen_shannon(x, w, ids, **of):
    return head.linear_js_divergence(x, w, x, w + 1, **of)


# What is read, and an option that one rank changes.
READ_OUTS = {
    "entropy of gathered": (head.linear_gather_log_probs, {"return_entropy": True}),
    "temperature of gathered": (head.linear_gather_log_probs, {"temperature": 2.0}),
    "temperature of top-k": (lambda x, w, ids, **of: head.linear_topk_log_probs(x, w, 2, **of), {"temperature": 2.0}),
    "top-p after top-k": (partial(sampled, top_k=3), {"top_p": 0.5}),
    "large top-k": (partial(sampled, top_k=5000), {"top_k": 6000}),
    "top-p": (partial(sampled, top_p=0.5), {"top_p": 0.6}),
    "chunks of top-p": (partial(sampled, top_p=0.5), {"chunk_tokens": 2}),
    "rounded logits": (
        lambda x, w, ids, **of: head.linear_gather_log_probs(x.bfloat16(), w.bfloat16(), ids, **of),
        {"logit_dtype": torch.bfloat16},
    ),
    "direction": (lambda x, w, ids, **of: head.linear_kl_divergence(x, w, x, w + 1, **of), {"direction": "reverse"}),
    "beta": (jensen_shannon, {"beta": 0.3}),
    "chunks of Jensen-Shannon": (jensen_shannon, {"chunk_tokens": 2}),
}


@ranks(2)
@pytest.mark.parametrize("name", READ_OUTS)
def test_an_option_of_one_rank_in_other_read_outs(name):
    hidden, weight, labels = parts()
    call, chosen = READ_OUTS[name]
    given = (hidden, weight, labels.unsqueeze(1).expand(-1, 2))
    with pytest.raises(ValueError, match=OPTIONS):
        call(*given, tp_group=dist.group.WORLD, **(chosen if dist.get_rank() else {}))
    for options in ({}, chosen):
        call(*given, tp_group=dist.group.WORLD, **options)


@ranks(2)
def test_options_that_may_differ():
    """Options that change a rank's memory alone may differ, and equal numbers may be written in different ways."""
    hidden, weight, labels = parts()
    rank = dist.get_rank()
    want = linear_cross_entropy(hidden, weight, labels, dist.group.WORLD, z_loss=1.0)
    more = [
        {"cache": rank, "chunk_tokens": 2 + rank},
        {"temperature": 1 if rank else 1.0, "z_loss": 1.0 if rank else 1},
    ]
    for chosen in more:
        found = linear_cross_entropy(hidden, weight, labels, dist.group.WORLD, **{"z_loss": 1.0, **chosen})
        torch.testing.assert_close(found, want)
