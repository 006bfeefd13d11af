"""Divergences of a student from a teacher over the whole vocabulary, from logits and from hidden states."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext import VocabShard, reference
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import group_size
from megatron_ext.head import (
    KL,
    AcceptanceRate,
    JensenShannon,
    LmHead,
    Logits,
    Teacher,
    TotalVariation,
    js_divergence,
    kl_divergence,
    linear_kl_divergence,
    soft_cross_entropy,
)
from tests.head.test_costs import costs_on_logits
from tests.ranks import ranks


def truth(kind, student, teacher, size=None):
    if kind == "cross entropy":
        return reference.soft_cross_entropy(student, teacher, size)
    if kind == "Jensen-Shannon":
        p, q = (z[..., :size].softmax(-1) for z in (student, teacher))
        return sum((x * (2 * (x + 1e-300) / (p + q + 1e-300)).log()).sum(-1) for x in (p, q)) / 2  # 0 where p is 0
    return reference.kl_divergence(*((teacher, student) if kind == "forward" else (student, teacher)), size)


def ours(kind, student, teacher, *rest, **chosen):
    if kind == "cross entropy":
        return soft_cross_entropy(student, teacher, *rest, **chosen)
    if kind == "Jensen-Shannon":
        return js_divergence(student, teacher, *rest, **chosen)
    return kl_divergence(student, teacher, kind, *rest, **chosen)


@ranks(1, 2, 4)
@pytest.mark.parametrize("kind", ["cross entropy", "forward", "reverse", "Jensen-Shannon"])
def test_from_logits(kind):
    """Uneven shards, padding, columns masked for both and for one of both, a shard masked as a whole."""
    group = dist.group.WORLD
    shard = VocabShard.split(41, group)
    student, teacher, upstream = 2 * torch.randn(4, 3, 41).double(), torch.randn(4, 3, 41).double(), torch.randn(4, 3)
    for z in (student, teacher):
        z[1, :, ::3] = -torch.inf
        z[2, :, :25] = -torch.inf
    if kind == "Jensen-Shannon":
        teacher[0, :, ::2] = student[3, :, ::2] = -torch.inf
    for size in (41, 37, 9):
        kept = student.clone()
        held = teacher.clone()
        if size == 9:  # row 2 would have nothing left
            kept[2], held[2] = 0.1 * torch.arange(41), 0.0
        whole = kept.requires_grad_()
        want = truth(kind, whole / 0.7, held / 0.7, size)
        (want_grad,) = torch.autograd.grad(want, whole, upstream.double())
        mine = whole.detach()[..., shard.start : shard.stop].clone().requires_grad_()
        own = held[..., shard.start : shard.stop].clone().requires_grad_()
        vocab = VocabShard(shard.start, shard.stop, size)
        for chunk_tokens in (None, 5):
            with count_collectives() as counts:
                found = ours(kind, mine, own, tp_group=group, vocab=vocab, chunk_tokens=chunk_tokens, temperature=0.7)
            chunks = 3 if chunk_tokens else 1
            sent = chunks + 2 if kind == "Jensen-Shannon" else 1
            assert counts.total() == sent * (group_size(group) > 1)
            torch.testing.assert_close(found, want)
            with count_collectives() as counts:
                grad, none = torch.autograd.grad(found, (mine, own), upstream.double(), allow_unused=True)
            assert not counts
            assert none is None, "the teacher gets no gradient"
            torch.testing.assert_close(grad, want_grad.nan_to_num(0.0)[..., shard.start : shard.stop])


@ranks(2)
def test_a_teacher_of_another_dtype_in_slices():
    """Hidden states of 3 and 5 columns, in 4 and 2 bytes each, gathered by one collective."""
    group, rank = dist.group.WORLD, dist.get_rank()
    hidden, weight = torch.randn(4, 3), torch.randn(20, 3)
    teacher_hidden, teacher_weight = torch.randn(4, 5).bfloat16(), torch.randn(20, 5).bfloat16()
    own, rows = slice(10 * rank, 10 * rank + 10), slice(2 * rank, 2 * rank + 2)
    with count_collectives() as counts:
        found = linear_kl_divergence(
            hidden[rows], weight[own], teacher_hidden[rows], teacher_weight[own], "forward", group, "sequence"
        )
    assert counts.total() == 2
    want = truth("forward", hidden @ weight.t(), (teacher_hidden @ teacher_weight.t()).float())
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    message = (
        r"teacher_weight has shape \(10, 6\), teacher_hidden \(\d, 5\)" if rank else "another rank of tp_group refused"
    )
    wrong = torch.zeros(10, 5 + rank).bfloat16()
    with pytest.raises(ValueError, match=message):
        linear_kl_divergence(hidden[rows], weight[own], teacher_hidden[rows], wrong, "forward", group, "sequence")
    many = hidden.unsqueeze(1).expand(-1, 5, -1)  # of each of the teacher's tokens five of the student's
    with pytest.raises(ValueError, match=message):
        linear_kl_divergence(many[rows], weight[own], teacher_hidden[rows], wrong, "forward", group, "sequence")
    found = linear_kl_divergence(
        many[rows], weight[own], teacher_hidden[rows], teacher_weight[own], "forward", group, "sequence"
    )
    torch.testing.assert_close(found, want.unsqueeze(1).expand(-1, 5), rtol=1e-5, atol=1e-5)


def test_in_bf16_as_exact_as_plain_pytorch():
    student, teacher = (4 * torch.randn(64, 400) + 100).bfloat16(), (4 * torch.randn(64, 400)).bfloat16()
    for kind in ("cross entropy", "reverse"):
        want = truth(kind, student.double(), teacher.double())
        plain = truth(kind, student.float(), teacher.float())
        found = ours(kind, student, teacher)
        assert (found - want).norm() <= 1.5 * (plain - want).norm()


def test_tokens_that_one_of_both_masks():
    """Infinite where the left one gives probability to what the other one has at -inf; else as if it were not there."""
    masked, whole = torch.zeros(1, 8), torch.zeros(1, 8)
    masked[:, 3] = -torch.inf
    assert kl_divergence(masked, whole).isinf().all()
    assert kl_divergence(whole, masked, "reverse").isinf().all()
    want = torch.tensor([8 / 7]).log()
    torch.testing.assert_close(kl_divergence(whole, masked), want)
    torch.testing.assert_close(kl_divergence(masked, whole, "reverse"), want)


@ranks(2)
def test_a_shard_that_counts_for_nothing():
    """One in which the teacher's probabilities are 0 in fp64, and which the student masks: as if it were not there."""
    group, rank = dist.group.WORLD, dist.get_rank()
    student, teacher = torch.randn(4, 3, 10).double(), torch.randn(4, 3, 10).double()
    student[..., 5:], teacher[..., 5:] = -torch.inf, teacher[..., 5:] - 2000
    own = slice(5 * rank, 5 * rank + 5)
    found = kl_divergence(student[..., own], teacher[..., own], tp_group=group)
    torch.testing.assert_close(found, truth("forward", student[..., :5], teacher[..., :5]))


@ranks(1, 2)
@pytest.mark.parametrize("kind", ["cross entropy", "forward", "reverse", "Jensen-Shannon"])
def test_a_token_left_out_of_the_loss_may_be_anything(kind):
    """NaN, or at -inf where the other one is not: without a gradient, or a part in other tokens' values."""
    group = dist.group.WORLD
    shard = VocabShard.split(8, group)
    own = slice(shard.start, shard.stop)
    student, teacher = torch.randn(3, 8), torch.randn(3, 8)
    student[1], student[2, 3], teacher[2, 5] = torch.nan, -torch.inf, -torch.inf
    mine, leaf = student[:, own].clone().requires_grad_(), student.requires_grad_()
    found, true = ours(kind, mine, teacher[:, own], tp_group=group), truth(kind, leaf[:1], teacher[:1])
    torch.testing.assert_close(found[:1], true)
    (grad,) = torch.autograd.grad(found, mine, torch.tensor([1.0, 0, 0]))
    (want,) = torch.autograd.grad(true.sum(), leaf)
    torch.testing.assert_close(grad, want[:, own])


@pytest.mark.slow
def test_bytes():
    """Beyond both logits and the gradient at most a tenth of one of them."""
    tokens, columns = 576, 16384
    for kind in ("cross entropy", "reverse"):

        def call(student, labels, tp_group, kind=kind):
            return ours(kind, student, torch.empty_like(student), tp_group=tp_group, chunk_tokens=16)

        forward, backward = costs_on_logits(call, tokens, columns, 2)
        assert forward.peak_bytes <= (1 + 0.1) * 2 * tokens * columns, "the teacher's logits among them"
        assert backward.peak_bytes <= 1.1 * 2 * tokens * columns


def test_bad_input():
    z, x, w = torch.zeros(4, 10), torch.zeros(4, 3), torch.zeros(10, 3)
    padded = "they must be equal; if the larger vocabulary is padded, pass its first"
    for call, said in (
        (lambda: kl_divergence(z, z, "both"), "direction is 'both'"),
        (lambda: soft_cross_entropy(z, z[:3]), r"teacher_logits have shape \(3, 10\)"),
        (lambda: soft_cross_entropy(z, z[:, :9]), f"teacher_logits has 9: {padded} 9 ids"),
        (lambda: linear_kl_divergence(x, w, x.long(), w), "teacher_hidden is torch.int64"),
        (lambda: linear_kl_divergence(x, w, x[:3], w), r"teacher_hidden has shape \(3, 3\)"),
        (lambda: linear_kl_divergence(x, w, x, w[:9]), f"teacher_weight has 9: {padded} 9 ids"),
        (lambda: linear_kl_divergence(x, w[:9], x, w), f"teacher_weight has 10: {padded} 9 ids"),
        (lambda: linear_kl_divergence(x, w, x, w, temperature=0), "temperature is 0"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


@pytest.mark.parametrize("read_out", [KL, JensenShannon, TotalVariation, AcceptanceRate])
def test_a_teacher_with_a_temperature_of_its_own_is_refused(read_out):
    """The student's temperature divides both logits; the teacher's was once dropped in silence."""
    x, w, z = torch.randn(4, 3), torch.randn(10, 3), torch.randn(4, 10)
    said = "temperature 1.7: the student's, 2.0, divides the logits of both"
    with pytest.raises(ValueError, match=f"teacher's head has {said}"):
        LmHead(w, temperature=2.0).read(x, read_out(Teacher(LmHead(w, temperature=1.7), x)))
    with pytest.raises(ValueError, match=f"teacher has {said}"):
        Logits(z, temperature=2.0).read(read_out(Logits(z, temperature=1.7)))
    same = LmHead(w, temperature=2.0).read(x, read_out(Teacher(LmHead(w + 1, temperature=2.0), x)))
    assert torch.equal(same, LmHead(w, temperature=2.0).read(x, read_out(Teacher(LmHead(w + 1), x))))
