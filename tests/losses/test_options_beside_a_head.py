"""Options of a loss beside an `LmHead` in the weight's place: merged with the head's, or refused; never dropped."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_ext import VocabShard, linear_log_probs
from megatron_ext.head import KL, LmHead, LogProbs, Teacher
from megatron_ext.losses import DistillationLoss, DPOLoss, GRPOLoss, KTOLoss, ORPOLoss, SimPOLoss, TopKDistillationLoss
from tests.batch_invariant_mode import fixed_calls, switched_on
from tests.losses.problems import B, S, V, drawn, head, rows
from tests.ranks import ranks

# Loss, and what it takes beside hidden states, weight and labels.
LOSSES = {
    "GRPO": (GRPOLoss, {"advantages": torch.arange(B) - 1.5}),
    "DPO": (DPOLoss, {"reference_log_probs": rows().others["reference_log_probs"]}),
    "SimPO": (SimPOLoss, {}),
    "ORPO": (ORPOLoss, {}),
    "KTO": (partial(KTOLoss, reference_free=True), {"desirable": torch.arange(B) % 2 == 0}),
}


def called(name, weight, **options):
    """The loss and its gradient by the weight; `weight`: of a leaf what the loss is given in its place."""
    kind, given = LOSSES[name]
    hidden, leaf = head()
    leaf.requires_grad_()
    loss, _ = kind(**options)(hidden, weight(leaf), rows().labels, **given)
    return loss, torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("name", LOSSES)
def test_log_probabilities_have_the_bits_that_are_asked_for(name):
    """The bits are those of the head with the same `bits`, in any chunks; the switch asks for them too."""
    kind, given = LOSSES[name]
    labels, (hidden, weight) = rows().labels, [x.float().requires_grad_() for x in head()]
    given = given | {"mask": (labels != -100).float()}

    def gradients(loss):
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    log_probs = linear_log_probs(hidden, weight, labels, bits="batch")
    expected = gradients(kind().from_log_probs(log_probs, **given)[0])
    with fixed_calls() as calls:
        for chunk in (None, 5):
            found = gradients(kind(bits="batch", chunk_tokens=chunk)(hidden, weight, labels, **given)[0])
            assert all(map(torch.equal, found, expected))
        assert len(calls) == 2
        kind()(hidden, weight, labels, **given)
        assert len(calls) == 2
        with switched_on():
            assert torch.equal(kind()(hidden, weight, labels, **given)[0], expected[0])
            kind(bits="fast")(hidden, weight, labels, **given)
        assert len(calls) == 3


@pytest.mark.parametrize("name", LOSSES)
def test_temperature_beside_a_head_is_taken(name):
    expected = called(name, lambda w: w, temperature=0.5)
    for found in (
        called(name, LmHead, temperature=0.5),
        called(name, lambda w: LmHead(w, temperature=0.5)),
        called(name, lambda w: LmHead(w, temperature=0.5), temperature=0.5),
    ):
        assert all(map(torch.equal, found, expected))
    with pytest.raises(ValueError, match=r"temperature is 0.5 .* 0.7"):
        called(name, lambda w: LmHead(w, temperature=0.7), temperature=0.5)


@pytest.mark.parametrize(
    "option, usual, other",
    [
        ("temperature", 1.0, 0.5),
        ("cache", "bounded", 1.0),
        ("hidden_layout", "replicated", "sequence"),
        ("gradient_accumulation_fusion", False, True),
    ],
)
def test_options_given_at_their_defaults_are_given(option, usual, other):
    """A head that says otherwise is refused, and not followed without a word."""
    for loss, given in (
        (GRPOLoss(**{option: usual}), (rows().labels, torch.ones(B))),
        (DistillationLoss(**{option: usual}), head()),
    ):
        hidden, weight = head()
        with pytest.raises(ValueError, match=f"{option} is {usual!r} of the loss and {other!r} of the LmHead"):
            loss(hidden, LmHead(weight, **{option: other}), *given)
        assert torch.equal(loss(hidden, LmHead(weight), *given)[0], loss(hidden, weight, *given)[0])
    (hidden, weight), (theirs, other) = head(), head()
    with pytest.raises(ValueError, match="hidden_layout is 'replicated' of the student and 'sequence' of the teacher"):
        DistillationLoss()(hidden, weight, theirs, LmHead(other, hidden_layout="sequence"))


def test_bits_and_chunks_beside_a_head_are_taken():
    with fixed_calls() as calls:
        called("GRPO", LmHead, bits="batch")
    assert len(calls) == 1
    for option, one, other in (
        ("bits", "batch", "fast"),
        ("chunk_tokens", 2, 3),
        ("cache", 0.5, 1.0),
        ("logit_dtype", torch.bfloat16, torch.float16),
        ("vocab", VocabShard(0, V, V), VocabShard(0, V, V - 1)),
    ):
        with pytest.raises(ValueError, match=f"{option} is .* LmHead"):
            called("DPO", lambda w, option=option, other=other: LmHead(w, **{option: other}), **{option: one})


def test_logit_dtype_beside_a_head_is_taken():
    hidden, weight = (x.bfloat16() for x in head())
    losses = [
        GRPOLoss(logit_dtype=torch.bfloat16)(hidden, given, rows().labels, torch.ones(B))[0]
        for given in (weight, LmHead(weight))
    ]
    assert torch.equal(*losses)
    with pytest.raises(ValueError, match="logit_dtype is torch.float16"):
        GRPOLoss(logit_dtype=torch.float16)(hidden, LmHead(weight), rows().labels, torch.ones(B))


@ranks(2)
def test_group_and_layout_beside_a_head_are_taken():
    group = dist.group.WORLD
    hidden, weight = head()
    vocab = VocabShard.split(V, group)
    shard = weight[vocab.start : vocab.stop].clone()
    mine = hidden.chunk(2)[dist.get_rank()]
    expected = called("GRPO", lambda w: w)[0]
    loss = GRPOLoss(tp_group=group, vocab=vocab, hidden_layout="sequence")
    for given in (shard, LmHead(shard), LmHead(shard, group), LmHead(shard, group, "sequence", vocab=vocab)):
        found, _ = loss(mine, given, rows().labels, LOSSES["GRPO"][1]["advantages"])
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="tp_group is .* LmHead"):
        loss(mine, LmHead(shard, dist.new_subgroups(1)[0]), rows().labels, torch.ones(B))


@ranks(2)
def test_distillation_merges_options_with_both_heads():
    group = dist.group.WORLD
    (hidden, weight), (theirs, other) = head(), (drawn(B, S, 7, seed=8), drawn(V, 7, seed=9))
    vocab = VocabShard.split(V, group)
    own = slice(vocab.start, vocab.stop)
    given = {"tp_group": group, "vocab": vocab, "temperature": 0.5}
    for loss, call in ((DistillationLoss, lambda x: x), (TopKDistillationLoss, lambda x: x.with_teacher)):
        more = {"k": 3} if loss is TopKDistillationLoss else {}
        expected, _ = call(loss(temperature=0.5))(hidden, weight, theirs, other, **more)
        for student, teacher in (
            (weight[own], LmHead(other[own])),
            (LmHead(weight[own]), other[own]),
            (LmHead(weight[own]), LmHead(other[own], group, temperature=0.5)),
        ):
            found, _ = call(loss(**given))(hidden, student, theirs, teacher, **more)
            torch.testing.assert_close(found, expected)
        with pytest.raises(ValueError, match="temperature"):
            call(loss(**given))(hidden, LmHead(weight[own], temperature=2.0), theirs, other[own], **more)
        with pytest.raises(ValueError, match="vocab is .* LmHead"):
            call(loss(**given))(hidden, weight[own], theirs, LmHead(other[own], vocab=VocabShard(0, 1, 1)), **more)


def test_teacher_with_other_shards_or_bits_is_refused():
    (hidden, weight), labels = head(), rows().labels
    for option, one, other in (
        ("vocab", VocabShard(0, V, V), VocabShard(0, V, V - 1)),
        ("bits", "fast", "batch"),
    ):
        student, teacher = LmHead(weight, **{option: one}), LmHead(weight, **{option: other})
        with pytest.raises(ValueError, match=f"{option} is .*teacher"):
            student.read(hidden, LogProbs(labels), KL(Teacher(teacher, hidden)))


@ranks(2)
def test_replaced_head_of_a_linear_layer_stays_unsharded():
    """A group of None means Megatron's in a Megatron job."""
    from tests.gpt import model_parallel

    with model_parallel(tp=2):
        hidden, weight = head()
        layer = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=torch.float64)
        layer.weight.data.copy_(weight)
        changed = replace(LmHead.of(layer), temperature=0.5)
        expected = LmHead.of(layer, temperature=0.5).read(hidden, LogProbs(rows().labels))
        assert torch.equal(changed.read(hidden, LogProbs(rows().labels)), expected)
        theirs, other = drawn(B, S, 7, seed=8), torch.nn.Linear(7, V, dtype=torch.float64)
        loss = TopKDistillationLoss().with_teacher
        wanted, _ = loss(hidden, LmHead.of(layer), theirs, LmHead.of(other), 3)
        from megatron_ext.distributed.groups import UNSHARDED

        found, _ = loss(
            hidden,
            LmHead(layer.weight, UNSHARDED),
            theirs,
            LmHead(other.weight, UNSHARDED, bias=other.bias, vocab=VocabShard(0, V, V)),
            3,
        )
        assert torch.equal(wanted, found)
