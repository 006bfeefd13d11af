"""Each fault is a ValueError that names argument, value, rule and fix: on every rank, and no rank is left waiting."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ext import (
    VocabShard,
    head,
    linear_cross_entropy,
    linear_log_probs,
    token_entropy,
    token_log_probs,
    vocab_parallel_cross_entropy,
)
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.losses import GRPOLoss
from tests.head.functions import OF_HIDDEN, OF_MADE_LOGITS, of_labels
from tests.ranks import ranks

T, D, V = 4, 6, 10

# What every rank can see: arguments, and what the message must say.
SEEN_BY_ALL = [
    ({"label_smoothing": -0.1}, r"label_smoothing is -0.1: it must be a number in \[0, 1\)"),
    ({"label_smoothing": 1}, r"label_smoothing is 1: "),
    ({"label_smoothing": float("nan")}, "label_smoothing is nan"),
    ({"label_smoothing": True}, "label_smoothing is True"),
    ({"label_smoothing": False}, "label_smoothing is False"),
    ({"z_loss": False}, "z_loss is False"),
    ({"z_loss": float("inf")}, "z_loss is inf: it must be a number at least 0 and finite"),
    ({"z_loss": -1e-3}, "z_loss is -0.001: it must be a number at least 0 and finite"),
    ({"z_loss": float("nan")}, "z_loss is nan"),
    ({"z_loss": "0.1"}, "z_loss is '0.1'"),
    ({"temperature": 0}, "temperature is 0: it must be a number above 0 and finite; 1.0 leaves the logits"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"softcap": 0.0}, "softcap is 0.0: it must be a number above 0 and finite; None turns it off"),
    ({"softcap": -30}, "softcap is -30"),
    ({"cache": -0.1}, r"cache is -0.1: it must be a number in \[0, 1\]"),
    *(({"cache": n}, rf"cache is {n}: .* or at least 1024, bytes") for n in (1.5, 2, 50, 100, 1023)),
    ({"cache": "all"}, "cache is 'all'"),
    ({"cache": None}, "cache is None"),
    ({"chunk_tokens": 0}, "chunk_tokens is 0: it must be a positive int"),
    ({"chunk_tokens": 2.0}, "chunk_tokens is 2.0"),
    ({"hidden_layout": "sp"}, "hidden_layout is 'sp': it must be one of 'replicated', 'sequence'"),
    ({"reduction": "avg"}, "reduction is 'avg': it must be one of 'none', 'sum', 'mean'"),
    ({"ignore_index": 1.5}, "ignore_index is 1.5: it must be an int"),
    ({"labels": torch.full((T,), V)}, rf"labels holds \[{V}\], outside \[0, {V}\): each must be a token id"),
    ({"labels": torch.full((T,), -1)}, r"labels holds \[-1\], outside"),
    ({"labels": torch.zeros(T)}, "labels is torch.float32: it must be a tensor of integer token ids"),
    ({"labels": torch.zeros(T), "loss_mask": torch.ones(T)}, "labels is torch.float32: it must be a tensor of integer"),
    ({"labels": [0] * T}, "labels is list"),
    ({"labels": torch.zeros(T, dtype=torch.bool)}, "labels is torch.bool"),
    ({"labels": torch.zeros(T + 4).long()}, r"hidden has shape \(4, 6\), labels \(8,\)"),
    ({"labels": torch.zeros(T).long().to("meta")}, "labels is on meta, hidden on cpu"),
    ({"loss_mask": [1.0] * T}, r"loss_mask is list: it must be a tensor of the labels' shape, \(4,\)"),
    ({"loss_mask": torch.ones(T + 1)}, r"loss_mask has shape \(5,\), labels \(4,\)"),
    ({"loss_mask": torch.ones(T, device="meta")}, "loss_mask is on meta, labels on cpu"),
    ({"hidden": torch.zeros(T, D).long()}, "hidden is torch.int64: it must be a tensor of float32"),
    ({"hidden": None}, "hidden is NoneType"),
    ({"hidden": None, "reduction": "mean"}, "hidden is NoneType"),
    ({"labels": torch.zeros(T).long().to("meta"), "reduction": "sum"}, "labels is on meta, hidden on cpu"),
    ({"vocab": 10}, "vocab is 10: it must be a VocabShard"),
    ({"tp_group": "tp"}, "tp_group is a str: it must be a torch.distributed.ProcessGroup"),
]

# What a single rank may see: its own weight, bias, shard or slice.
SEEN_BY_ONE = [
    ({"weight": torch.zeros(V, D).double()}, "weight is torch.float64, hidden torch.float32"),
    ({"weight": torch.zeros(V, D).long()}, "weight is torch.int64"),
    ({"weight": torch.zeros(V, D + 1)}, r"weight has shape \(10, 7\), hidden \(4, 6\)"),
    ({"weight": torch.zeros(D)}, r"weight has shape \(6,\): it must have 2 dims"),
    ({"weight": torch.zeros(V, D, device="meta")}, "weight is on meta, hidden on cpu"),
    ({"bias": torch.zeros(V + 1)}, r"bias has shape \(11,\), weight \(10, 6\)"),
    ({"bias": torch.zeros(V).bfloat16()}, "bias is torch.bfloat16, hidden torch.float32"),
    ({"bias": torch.zeros(V, 1)}, r"bias has shape \(10, 1\): it must have 1 dims"),
]


def arguments(**changed):
    valid = {"hidden": torch.zeros(T, D), "weight": torch.zeros(V, D), "labels": torch.arange(T), "tp_group": None}
    return {**valid, **changed}


def number(x):
    return x.sum() if isinstance(x, torch.Tensor) else x[0].sum()


@pytest.mark.parametrize("changed, message", SEEN_BY_ALL + SEEN_BY_ONE, ids=lambda x: str(x)[:40])
def test_alone(changed, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments(**changed))
    only_loss = {"label_smoothing", "z_loss", "reduction"}
    if not only_loss & changed.keys():
        with pytest.raises(ValueError, match=message):
            linear_log_probs(**arguments(**changed))


@ranks(2)
def test_faults_that_all_see_are_raised_before_anything_is_sent():
    with count_collectives() as counts:
        for changed, message in SEEN_BY_ALL:
            if "outside" in message:
                continue  # the other ranks may have been given other labels
            with pytest.raises(ValueError, match=message):
                linear_cross_entropy(**arguments(**{"tp_group": dist.group.WORLD, **changed}))
        for layout_fault in (torch.zeros(3).long(), torch.tensor(1)):
            with pytest.raises(ValueError, match="must divide by the 2 ranks of tp_group; pad the sequence"):
                linear_cross_entropy(
                    **arguments(labels=layout_fault, tp_group=dist.group.WORLD, hidden_layout="sequence")
                )
    assert counts.total() == 0


@ranks(2, 4)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_a_fault_of_one_rank_is_raised_on_all(layout):
    """The rank that sees it says what it is; the others learn of it in the exchange they wait in, and go on in step."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    good = arguments(tp_group=group, hidden_layout=layout)
    good["labels"] = torch.arange(T * size) if layout == "sequence" else good["labels"]
    faults = [
        *SEEN_BY_ONE,
        ({"vocab": VocabShard(V, 2 * V - 1, size * V)}, "vocab is .* with 9 columns, weight has 10"),
    ]
    if layout == "sequence":
        faults.append(({"hidden": torch.zeros(T - 1, D)}, r"hidden has shape \(3, 6\), labels \(.*slice of dim 0"))
    for changed, message in faults:
        own = {**good, **changed} if rank == 1 else good
        if rank != 1:
            message = "another rank of tp_group refused its arguments"
        for call in (linear_cross_entropy, linear_log_probs, partial(linear_cross_entropy, skip_ignored=True)):
            with count_collectives() as counts, pytest.raises(ValueError, match=message):
                call(**own)
            assert counts.total() == (1 if layout == "replicated" else 2), "no exchange of its own"
        linear_cross_entropy(**good)  # the ranks are still in step


@ranks(2, 4)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
@pytest.mark.parametrize("given", [False, True], ids=["no vocab", "vocab"])
def test_ids_outside_the_vocabulary_that_one_rank_alone_is_given(given, layout):
    """Ids below and above the vocabulary are refused, whether the size of the vocabulary is known or a guess."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(rank)
    vocab = VocabShard.equal(V, group) if given else None
    hidden, weight = torch.randn(T, D, generator=g), torch.randn(V, D, generator=g)
    good = torch.arange(T * size if layout == "sequence" else T)
    more = {"tp_group": group, "vocab": vocab}
    calls = of_labels(OF_MADE_LOGITS) if layout == "replicated" else {}
    calls |= of_labels({name: partial(call, hidden_layout=layout) for name, call in OF_HIDDEN.items()})
    for call, name in calls.values():
        for wrong in (-1, size * V):
            ids = good.clone()
            ids[1] = wrong if rank == 1 else 0
            said = rf"{name} holds .* outside \[0, {size * V}\)" if rank == 1 else "another rank of tp_group refused"
            with pytest.raises(ValueError, match=said):
                call(hidden, weight, ids, **more)
        call(hidden, weight, good, **more)  # the ranks are still in step


@ranks(2)
def test_shards_that_do_not_make_up_the_vocabulary():
    group, rank = dist.group.WORLD, dist.get_rank()
    one_vocabulary = "the shards of the ranks of tp_group must cover one vocabulary once.*Over gloo .* fewer tokens"
    for shards in (
        [VocabShard(0, 10, 20), VocabShard(10, 20, 21)],  # two sizes
        [VocabShard(0, 10, 21), VocabShard(10, 20, 21)],  # a gap
        [VocabShard(0, 10, 15), VocabShard(0, 10, 15)],  # twice
        [VocabShard(0, 10, 20), VocabShard(0, 10, 20)],  # the first half twice, and not the second
        [VocabShard(5, 15, 20), VocabShard(10, 20, 20)],
    ):
        with pytest.raises(ValueError, match=one_vocabulary):
            linear_cross_entropy(**arguments(tp_group=group, vocab=shards[rank]))
    with pytest.raises(ValueError, match=one_vocabulary):  # unequal, and not said so
        linear_cross_entropy(**arguments(tp_group=group, weight=torch.zeros(V - rank, D)))


def test_hidden_states_in_the_place_of_logits_are_suspected():
    for call in (token_log_probs, vocab_parallel_cross_entropy):
        with pytest.raises(
            ValueError, match=r"outside \[0, 6\): .*; if logits \(4, 6\) are hidden states, pass them wi"
        ):
            call(torch.zeros(T, D), torch.full((T,), V - 1))


def test_labels_of_a_narrow_integer_type():
    """Their largest id is below the vocabulary's size, which they cannot hold."""
    wide = torch.randn(2, 300)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        labels = torch.tensor([5, 100], dtype=dtype)
        torch.testing.assert_close(token_log_probs(wide, labels), wide.log_softmax(-1)[range(2), [5, 100]])


def test_labels_of_bytes_are_not_ignored():
    """The ignore index of -100 would be 156 in uint8."""
    hidden, weight, labels = torch.randn(1, 3, D), torch.randn(256, D), torch.tensor([[156, 3, 156]])
    losses = F.cross_entropy((hidden @ weight.T)[0], labels[0], reduction="none")
    narrow = labels.to(torch.uint8)
    for reduction, expected in (("none", losses[None]), ("mean", losses.mean())):
        for options in ({}, {"skip_ignored": True}, {"loss_mask": torch.ones(1, 3)}):
            found = linear_cross_entropy(hidden, weight, narrow, reduction=reduction, **options)
            torch.testing.assert_close(found, expected)
    found = head.linear_sampled_log_probs(hidden, weight, narrow, skip_ignored=True)
    torch.testing.assert_close(found, -losses[None])
    old = torch.linspace(-6, -4, 3)[None]
    loss, expected = (GRPOLoss()(hidden, weight, x, torch.ones(1), old_log_probs=old)[0] for x in (narrow, labels))
    torch.testing.assert_close(loss, expected)
    draft = head.DraftVocabulary.of_mask(torch.ones(256, dtype=torch.bool))
    assert all(map(torch.equal, draft.labels(narrow), draft.labels(labels)))


@ranks(2)
def test_a_group_without_this_rank():
    groups = [dist.new_group([rank]) for rank in range(2)]
    with pytest.raises(ValueError, match="tp_group does not hold this rank"):
        linear_cross_entropy(**arguments(tp_group=groups[1 - dist.get_rank()]))


LOGITS_FAULTS = [
    ({"logits": torch.zeros(T, V).long()}, "logits is torch.int64"),
    ({"logits": torch.tensor(1.0)}, r"logits has shape \(\): it must have at least 1 dims"),
    ({"labels": torch.zeros(T + 1).long()}, r"labels has leading dims \(5,\) on cpu, logits \(4,\)"),
    ({"labels": torch.full((T,), V)}, r"labels holds \[10\], outside \[0, 10\)"),
    ({"vocab": VocabShard(0, 9, 9)}, "with 9 columns, logits has 10: they must be equal"),
    ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
    ({"z_loss": -1}, "z_loss is -1"),
    ({"loss_mask": torch.ones(T, 1)}, r"loss_mask has shape \(4, 1\)"),
    ({"labels": torch.zeros(T), "loss_mask": torch.ones(T)}, "labels is torch.float32"),
    ({"reduction": None}, "reduction is None"),
]


@pytest.mark.parametrize("changed, message", LOGITS_FAULTS, ids=lambda x: str(x)[:40])
def test_logits(changed, message):
    given = {"logits": torch.zeros(T, V), "labels": torch.arange(T), **changed}
    with pytest.raises(ValueError, match=message):
        vocab_parallel_cross_entropy(**given)
    if not {"label_smoothing", "z_loss", "reduction"} & changed.keys():
        with pytest.raises(ValueError, match=message):
            token_log_probs(**given)
    if "logits" in changed:
        with pytest.raises(ValueError, match=message):
            token_entropy(changed["logits"])


def test_a_label_in_the_padding():
    vocab, labels = VocabShard(0, V, V - 2), torch.tensor([0, V - 2, 1, -100])
    for call in (
        lambda: linear_cross_entropy(**arguments(vocab=vocab, labels=labels)),
        lambda: token_log_probs(torch.zeros(T, V), labels, vocab=vocab),
    ):
        with pytest.raises(ValueError, match=r"labels holds \[8\], outside \[0, 8\)"):
            call()


def test_ignored_labels_are_no_fault():
    labels = torch.tensor([0, -100, 9, -100])
    assert linear_cross_entropy(**arguments(labels=labels)).shape == (T,)
    assert linear_cross_entropy(**arguments(labels=labels.where(labels >= 0, 77), ignore_index=77)).shape == (T,)
