"""Distillation over the whole vocabulary and over a teacher's top-k: edges, costs, what is refused.

Values and gradients are those of `tests.fuzz.distillation` and of test_distillation_layouts.py.
"""

import pytest
import torch
import torch.distributed as dist

from benchmarks.meter import measure, one_rank_of
from megatron_ext import VocabShard
from megatron_ext.head import LmHead, js_divergence, linear_js_divergence
from megatron_ext.losses import DistillationLoss, TopKDistillationLoss
from tests.losses.problems import V, drawn
from tests.ranks import ranks

T, D, K = 8, 5, 4


def heads():
    student = [x.requires_grad_() for x in (drawn(T, D), drawn(V, D, seed=1))]
    return student, [drawn(T, 7, seed=2), drawn(V, 7, seed=3)], (drawn(T, seed=4) > -0.5).double()


def test_over_few_columns_only_these_are_computed():
    tokens, width, columns, k = 32, 4, 4096, 8
    x, w = drawn(tokens, width).requires_grad_(), drawn(columns, width, seed=1).requires_grad_()
    ids = torch.stack([torch.randperm(columns)[:k] for _ in range(tokens)])
    with measure() as found:
        TopKDistillationLoss()(x, w, drawn(tokens, k, seed=2), ids)[0].backward()
    assert found.flops == 6 * tokens * width * len(ids.unique())


def test_nothing_is_left_for_the_bucket():
    """The loss is 0 between equals and its gradient finite where ids have all of the probability."""
    z = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.float64).log_softmax(-1)[:, :2].requires_grad_()
    found, _ = TopKDistillationLoss(bucket=True, divergence="reverse").from_log_probs(z, z.detach())
    assert abs(found) < 1e-12
    assert torch.autograd.grad(found, z)[0].isfinite().all()
    with pytest.raises(ValueError, match="bucket and zero_outside_topk are both True"):
        TopKDistillationLoss(bucket=True, zero_outside_topk=True)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "mixed", "jsd"])
def test_ids_that_the_teacher_rules_out(divergence, zero):
    """The same as at `exp(-100)`, with finite gradients."""
    loss = TopKDistillationLoss(divergence=divergence, zero_outside_topk=zero)
    logits = drawn(T, K)
    logits[::2, 1] = -torch.inf
    teacher = logits.log_softmax(-1)
    found, want = [], []
    for given, kept in ((teacher, found), (teacher.clamp(min=-100.0), want)):
        z = drawn(T, V, seed=1).requires_grad_()
        log_probs = z.log_softmax(-1)
        student = log_probs[:, :K] if zero else log_probs[:, :K].log_softmax(-1)
        value, _ = loss.from_log_probs(student, given, -(log_probs.exp() * log_probs).sum(-1))
        kept += [value, torch.autograd.grad(value, z)[0]]
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "mixed", "jsd"])
def test_ids_that_the_student_rules_out(divergence, zero, both):
    """Nothing in the reverse divergence; infinite in the forward one, unless the teacher rules them out too."""
    loss = TopKDistillationLoss(divergence=divergence, zero_outside_topk=zero)
    logits = drawn(T, K)
    if both:
        logits[:, 1] = -torch.inf
    teacher, found, want = logits.log_softmax(-1), [], []
    for ruled_out, kept in ((-torch.inf, found), (-100.0, want)):
        z = drawn(T, V, seed=1)
        z[::2, 1] = ruled_out
        z.requires_grad_()
        log_probs = z.log_softmax(-1)
        student = log_probs[:, :K] if zero else log_probs[:, :K].log_softmax(-1)
        value, _ = loss.from_log_probs(student, teacher, torch.special.entr(log_probs.detach().exp()).sum(-1))
        kept += [value, torch.autograd.grad(value, z)[0]]
    if divergence in ("forward", "mixed") and not both:
        assert found[0] == torch.inf
    else:
        torch.testing.assert_close(found, want)


def test_16_bit_log_probabilities_are_added_up_in_fp32():
    student, teacher = (drawn(T, K, seed=seed).log_softmax(-1).bfloat16() for seed in (0, 1))
    found, _ = TopKDistillationLoss().from_log_probs(student, teacher)
    assert found == TopKDistillationLoss().from_log_probs(student.float(), teacher.float())[0]


def test_equal_distributions_are_0_apart():
    z = drawn(3, V, scale=3.0).float().requires_grad_()
    found = js_divergence(z, z.detach())
    assert found.abs().max() < 1e-6
    assert torch.autograd.grad(found.sum(), z)[0].abs().max() < 1e-6


@pytest.mark.slow
def test_no_more_than_chunks_of_logits():
    tokens, columns, width = 512, 16384, 16
    with one_rank_of(2) as group:
        x, w = torch.empty(tokens, width, requires_grad=True), torch.empty(columns, width, requires_grad=True)
        teacher = torch.empty(tokens, width), torch.empty(columns, width)
        with measure() as found:
            linear_js_divergence(x, w, *teacher, tp_group=group, chunk_tokens=32).sum().backward()
    assert found.flops == (2 * 2 + 2 * 2 + 2 * 2) * tokens * columns * width  # two heads, forward and back; dx and dW
    assert found.peak_bytes < 0.6 * 4 * tokens * columns


@ranks(2)
def test_what_one_rank_refuses_is_raised_on_both():
    x, w, wrong = torch.randn(4, 3), torch.randn(10, 3), torch.randn(10, 3 + dist.get_rank())
    with pytest.raises(ValueError, match="weight has shape" if dist.get_rank() else "another rank of tp_group refused"):
        linear_js_divergence(x, w, x, wrong, tp_group=dist.group.WORLD)
    vocab = VocabShard(10 * dist.get_rank(), 10 * dist.get_rank() + 10, 20 - dist.get_rank())
    with pytest.raises(ValueError, match="agree on the vocabulary's size"):
        linear_js_divergence(x, w, x, w, tp_group=dist.group.WORLD, vocab=vocab)


def test_a_teacher_of_nan_where_nothing_counts():
    """The same value and gradients as with any other numbers there."""
    student, teacher, mask = heads()
    assert (mask == 0).any()
    logits, ids = (teacher[0] @ teacher[1].t()).topk(K)
    off = (mask == 0).unsqueeze(-1)
    heads_of = {torch.nan: [teacher[0].masked_fill(off, torch.nan), teacher[1]], 0.0: teacher}
    calls = [
        lambda at, kind=kind: DistillationLoss(divergence=kind)(*student, *heads_of[at], mask)
        for kind in ("forward", "reverse", "jsd")
    ]
    calls += [
        lambda at, kind=kind, zero=zero: TopKDistillationLoss(divergence=kind, zero_outside_topk=zero)(
            *student, logits.masked_fill(off, at), ids, mask
        )
        for kind in ("forward", "reverse", "mixed", "jsd")
        for zero in (False, True)
    ]
    for call in calls:
        (found, want), _ = zip(call(torch.nan), call(0.0), strict=True)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(torch.autograd.grad(found, student), torch.autograd.grad(want, student))
    z = (student[0] @ student[1].t()).detach().requires_grad_()
    for kind in ("forward", "reverse", "jsd"):
        loss = DistillationLoss(divergence=kind)
        found, want = (loss.from_logits(z, head[0] @ head[1].t(), mask)[0] for head in heads_of.values())
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(torch.autograd.grad(found, z), torch.autograd.grad(want, z))


def test_refused():
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"beta is 1: it must be a number in \(0, 1\)"):
        js_divergence(x, x, 1)
    with pytest.raises(ValueError, match="divergence is 'mixed'"):
        DistillationLoss(divergence="mixed")
    with pytest.raises(ValueError, match="mixed_kl_weight is 2"):
        TopKDistillationLoss(mixed_kl_weight=2)
    with pytest.raises(ValueError, match="mixed_kl_weight is '0.5'"):
        TopKDistillationLoss(mixed_kl_weight="0.5")
    with pytest.raises(ValueError, match="entropy is None"):
        TopKDistillationLoss(zero_outside_topk=True, divergence="reverse").from_log_probs(x, x)
    for option in ({"bits": "batch"}, {"logit_dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match="from_logits is for logits that exist, and gives neither"):
            DistillationLoss(**option).from_logits(x, x)


@pytest.mark.parametrize("ids_of", ["teacher", "student"])
def test_teacher_weight_takes_bits_and_logit_dtype_of_student(ids_of, monkeypatch):
    (hidden, weight), teacher = ([x.bfloat16() for x in head] for head in heads()[:2])
    found, read = [], LmHead.read

    def recorded(head, *args, **kwargs):
        found.append((head.bits, head.logit_dtype))
        return read(head, *args, **kwargs)

    monkeypatch.setattr(LmHead, "read", recorded)
    student = LmHead(weight, bits="batch", logit_dtype=torch.bfloat16)
    TopKDistillationLoss().with_teacher(hidden, student, *teacher, K, ids_of)
    assert len(found) >= 2
    assert set(found) == {("batch", torch.bfloat16)}


def test_a_teacher_with_a_temperature_of_its_own_is_refused():
    """The teacher's temperature was once dropped in silence."""
    (hidden, weight), (teacher_hidden, teacher_weight), _ = heads()
    teacher = LmHead(teacher_weight, temperature=1.7)
    said = "teacher_weight has temperature 1.7: the student's, 2.0, divides the logits of both"
    with pytest.raises(ValueError, match=said):
        TopKDistillationLoss(temperature=2.0).with_teacher(hidden, weight, teacher_hidden, teacher, K)
    with pytest.raises(ValueError, match=said):
        DistillationLoss(temperature=2.0)(hidden, weight, teacher_hidden, teacher)
    same = LmHead(teacher_weight, temperature=2.0)
    found, want = (
        TopKDistillationLoss(temperature=2.0).with_teacher(hidden, weight, teacher_hidden, each, K)[0]
        for each in (same, teacher_weight)
    )
    assert torch.equal(found, want)


@pytest.mark.parametrize("option", ["bucket", "zero_outside_topk"])
def test_repeated_ids_are_refused_beside_what_is_outside_of_them(option):
    """Padding may have any ids, and a loss without an outside may have an id twice."""
    x, w, ids = torch.randn(4, 3), torch.randn(10, 3), torch.tensor([[0, 1], [2, 2], [3, 4], [5, 6]])
    log_probs = torch.full((4, 2), 0.25).log()
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    once = ids.where(ids != 2, torch.tensor([7, 8]))
    for divergence in ("forward", "reverse", "mixed", "jsd"):
        loss = TopKDistillationLoss(divergence=divergence, **{option: True})
        with pytest.raises(ValueError, match=f"teacher_topk_indices has an id twice .* with {option}=True"):
            loss(x, w, log_probs, ids)
        found, want = (loss(x, w, log_probs, each, mask)[0] for each in (ids, once))
        assert torch.equal(found, want)
    TopKDistillationLoss()(x, w, log_probs, ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_no_log_probabilities_for_the_bucket(dtype):
    """Tokens that do not count may have logits, and the sum of rounded probabilities may be above 1."""
    x, w, logits = torch.randn(4, 3), torch.randn(4096, 3), torch.randn(4, 4096) * 3
    loss, (values, ids) = TopKDistillationLoss(bucket=True), logits.topk(64)
    with pytest.raises(ValueError, match="teacher_topk_logits has a token that counts whose exponentials add up to m"):
        loss(x, w, values.to(dtype), ids)
    log_probs, mask = logits.log_softmax(-1).to(dtype), torch.tensor([1.0, 0.0, 1.0, 0.5])
    every = torch.arange(4096).expand(4, 4096)
    assert loss(x, w, log_probs, every)[0].isfinite()
    mixed = log_probs.where(mask.unsqueeze(-1) > 0, logits.to(dtype))
    assert torch.equal(loss(x, w, mixed, every, mask)[0], loss(x, w, log_probs, every, mask)[0])


def test_a_loss_is_compiled_whole():
    student, teacher, _ = heads()
    loss = DistillationLoss(divergence="forward")

    def value(hidden, weight):
        return loss(hidden, weight, *teacher)

    found = torch.compile(value, backend="eager", fullgraph=True)(*student)
    torch.testing.assert_close(found, value(*student))
