"""LoRA on a head: costs, what is refused, dropout, 16 bits. tests/head/test_read.py has it with every read-out."""

import re

import pytest
import torch
import torch.distributed as dist

from benchmarks.meter import measure, one_rank_of
from megatron_ext import VocabShard, linear_cross_entropy, linear_log_probs
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.head import KL, Entropy, LmHead, LogProbs, LoRA, Teacher
from tests.head.problems import error
from tests.ranks import ranks

T, D, V, RANK = 24, 16, 40, 4


def drawn(dtype=torch.float64):
    g = torch.Generator().manual_seed(5)
    hidden, weight, a, b = (
        torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
        for shape in ((T, D), (V, D), (RANK, D), (V, RANK))
    )
    return hidden, weight / 4, a / 4, b / 2, torch.randint(0, V, (T,), generator=g)


def losses(hidden, weight, a, b, labels, scaling=0.5):
    return torch.nn.functional.cross_entropy(hidden @ (weight + scaling * (b @ a)).t(), labels, reduction="none")


@pytest.mark.parametrize("layout", ["replicated", "sequence"])
@pytest.mark.parametrize("cache, own", [(0, 6), (1, 4)])
def test_frozen_weight_costs_no_gradient_and_no_memory(layout, cache, own):
    """Products of D and of r alike: the low rank has those of a weight that trains, and those with A are small."""
    tokens, width, columns, count, ranks_ = 1024, 512, 2048, 16, 4
    with one_rank_of(ranks_) as group:
        rows = tokens // ranks_ if layout == "sequence" else tokens
        hidden = torch.empty(rows, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(columns, width, dtype=torch.bfloat16)
        a, b = (torch.empty(*shape, requires_grad=True) for shape in ((count, width), (columns, count)))
        with measure() as found:
            loss = linear_cross_entropy(
                hidden, weight, torch.zeros(tokens, dtype=torch.int64), group, layout, cache=cache, lora=LoRA(a, b, 2.0)
            )
            loss.backward(torch.randn(tokens))
    assert (
        found.flops == own * tokens * columns * width + (own + 2) * tokens * columns * count + 6 * rows * width * count
    )
    assert found.collectives.total() == (2 if layout == "replicated" else 5)
    rows_of_weight = [shape for _, shape in found.largest if shape[:1] == (columns,) and shape[-1] > count]
    assert not [shape for shape in rows_of_weight if shape != (columns,)], "neither dW nor a merged weight"
    assert b.grad.dtype == a.grad.dtype == torch.float32


@ranks(1, 2)
def test_a_parameter_that_a_framework_sums_is_left_to_it():
    """Megatron adds the gradients of parameters with `sequence_parallel` over tensor-parallel ranks itself."""
    group, hidden, weight, a, b, labels = dist.group.WORLD, *drawn()
    rank, count = dist.get_rank(), dist.get_world_size()
    shard = VocabShard.equal(V // count, group)
    mine, part = slice(shard.start, shard.stop), hidden.chunk(count)[rank]
    true_a = a.clone().requires_grad_()
    losses(hidden, weight, true_a, b, labels).sum().backward()
    found = []
    for marked in ([False], [True], [False, True]):  # of one adapter, and of its two halves
        own = [x.clone().requires_grad_() for x in a.chunk(len(marked))]
        for own_a, mark in zip(own, marked, strict=True):
            own_a.sequence_parallel = mark
        adapters = [LoRA(*each, 0.5) for each in zip(own, b[mine].chunk(len(marked), 1), strict=True)]
        loss = linear_cross_entropy(part, weight[mine], labels, group, "sequence", lora=adapters)
        with count_collectives() as sent:
            loss.sum().backward()
        for own_a, mark in zip(own, marked, strict=True):
            if mark:
                dist.all_reduce(own_a.grad)
        assert sent.total() == (0 if count == 1 else 1 if all(marked) else 2), "frozen: no gather of hidden states"
        found.append(error(torch.cat([own_a.grad for own_a in own]), true_a.grad))
    assert max(found) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_err_no_more_than_a_merged_weight(dtype):
    hidden, weight, a, b, labels = drawn(dtype)
    wide = [x.double().requires_grad_() for x in (hidden, a, b)]
    true = losses(wide[0], weight.double(), *wide[1:], labels)
    true.sum().backward()
    narrow = [x.clone().requires_grad_() for x in (hidden, a, b)]
    plain = losses(narrow[0], weight, *narrow[1:], labels)
    plain.float().sum().backward()
    ours = [x.clone().requires_grad_() for x in (hidden, a, b)]
    loss = linear_cross_entropy(ours[0], weight, labels, lora=LoRA(*ours[1:], 0.5))
    loss.sum().backward()
    assert error(loss, true) <= error(plain, true)
    for got, merged, exact in zip(ours, narrow, wide, strict=True):
        assert got.grad.dtype == dtype
        assert error(got.grad, exact.grad) <= 1.1 * error(merged.grad, exact.grad)


def test_dropout_leaves_out_low_rank_entries_and_gradients_alone():
    hidden, weight, a, b, labels = drawn()
    leaves = [x.clone().requires_grad_() for x in (hidden, a, b)]
    torch.manual_seed(1)
    loss = linear_log_probs(leaves[0], weight, labels, lora=LoRA(*leaves[1:], 0.5, dropout=0.25))
    loss.sum().backward()
    torch.manual_seed(1)
    same = [x.clone().requires_grad_() for x in (hidden, a, b)]
    left = torch.nn.functional.dropout(same[0], 0.25)
    z = same[0] @ weight.t() + 0.5 * (left @ same[1].t()) @ same[2].t()
    (-torch.nn.functional.cross_entropy(z, labels, reduction="sum")).backward()
    assert (left == 0).any()
    for got, true in zip(leaves, same, strict=True):
        assert error(got.grad, true.grad) < 1e-14


def test_under_autocast_adapters_are_rounded_as_the_weight_is():
    hidden, weight, a, b, labels = drawn(torch.float32)
    leaves = [x.clone().requires_grad_() for x in (hidden, a, b)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(leaves[0], weight, labels, lora=LoRA(*leaves[1:], 0.5))
    loss.sum().backward()
    rounded = [x.bfloat16().double() for x in (hidden, weight, a, b)]
    assert error(loss, losses(*rounded, labels)) < 1e-2
    assert [x.grad.dtype for x in leaves] == [torch.float32] * 3


def test_a_teacher_may_have_one_and_gets_no_gradient():
    """The adapter is the student's, as for a policy against its own base, or the teacher's."""
    hidden, weight, a, b, _ = drawn()
    low = [x.clone().requires_grad_() for x in (a, b)]
    for of_student in (True, False):
        with_it, without = LmHead(weight, lora=LoRA(*low, 0.5)), LmHead(weight)
        student, teacher = (with_it, without) if of_student else (without, with_it)
        x = hidden.clone().requires_grad_()
        found = student.read(x, KL(Teacher(teacher, hidden)))
        merged = [weight + 0.5 * (b @ a), weight]
        p, q = ((hidden @ w.t()).log_softmax(-1) for w in (merged if not of_student else merged[::-1]))
        assert error(found, (p.exp() * (p - q)).sum(-1)) < 1e-12
        found.sum().backward()
        assert all((each.grad is not None) == of_student for each in low)
        low = [each.detach().requires_grad_() for each in low]


@pytest.mark.parametrize(
    "lora, said",
    [
        (object(), "it must be LoRA(A, B, scaling)"),
        ((torch.ones(2, D), torch.ones(V, 2)), "lora is or holds Tensor: it must be LoRA(A, B, scaling)"),
        (
            LoRA(torch.ones(2, D), torch.ones(V, 2), None),
            "lora scaling is None: it must be a number that is finite; pass lora_alpha / r",
        ),
        (LoRA(torch.ones(2, D), torch.ones(V, 2), 1.0, "0"), "lora dropout is '0': it must be a number"),
        (LoRA(torch.ones(2, D), torch.ones(V, 3)), "they must be [r, D], [V/R, r] and [V/R, D]"),
        (LoRA(torch.ones(2, D + 1), torch.ones(V, 2)), "they must be [r, D], [V/R, r] and [V/R, D]"),
        (LoRA(torch.ones(2, D, dtype=torch.int64), torch.ones(V, 2)), "lora A is torch.int64"),
        (
            LoRA(torch.ones(2, D), torch.ones(V, 2), float("nan")),
            "lora scaling is nan: it must be a number that is finite",
        ),
        (LoRA(torch.ones(2, D), torch.ones(V, 2), 1.0, 1.0), "lora dropout is 1.0: it must be a number in [0, 1)"),
        (LoRA(torch.ones(2, D), torch.ones(V - 1, 2)), "B must have a row for each of the weight's"),
    ],
    ids=range(10),
)
def test_what_is_refused(lora, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        linear_cross_entropy(torch.ones(3, D), torch.ones(V, D), torch.zeros(3).long(), lora=lora)


@ranks(2)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_what_one_rank_sees_is_raised_on_both(layout):
    """One whose B has a row too few, a column too many, or integers; one whose weight is too wide; and dropout of what
    both hold, which would leave out other entries on each."""
    rank, group = dist.get_rank(), dist.group.WORLD
    hidden, labels = torch.ones(4 if layout == "replicated" else 2, D), torch.zeros(4).long()
    for b, width, own in (
        (torch.ones(V - rank, 2), D, "B must have a row"),
        (torch.ones(V, 2 + rank), D, "they must be .r, D., .V/R, r. and .V/R, D."),
        (torch.ones(V, 2, dtype=torch.int64 if rank else None), D, "lora B is torch.int64"),
        (torch.ones(V, 2), D + rank, "their last dims must be equal"),
    ):
        head = LmHead(torch.ones(V, width), group, layout, lora=LoRA(torch.ones(2, D), b))
        with pytest.raises(ValueError, match=own if rank else "another rank of tp_group refused"):
            head.read(hidden, LogProbs(labels), Entropy())
    lora = LoRA(torch.ones(2, D), torch.ones(V, 2), dropout=0.1)
    if layout == "replicated":
        with pytest.raises(ValueError, match="they must leave out the same entries"):
            LmHead(torch.ones(V, D), group, lora=lora).read(hidden, LogProbs(labels))
    else:
        weight = torch.ones(V, D) * torch.arange(V).unsqueeze(1) * (1 + rank) / V
        assert LmHead(weight, group, layout, lora=lora).read(hidden, Entropy()).shape == (4,)


@ranks(2)
@pytest.mark.parametrize("other", [None, "scaling", "rank"])
def test_ranks_with_other_adapters_are_all_told(other):
    hidden, weight, a, b, labels = drawn()
    own = VocabShard.split(V, dist.group.WORLD)
    weight, b = weight[own.start : own.stop], b[own.start : own.stop]
    lora = LoRA(a, b, 0.5)
    if dist.get_rank() == 1:
        lora = {None: None, "scaling": LoRA(a, b, 0.25), "rank": LoRA(a[:2], b[:, :2], 0.5)}[other]
    with pytest.raises(ValueError, match="the options are not the same"):
        linear_log_probs(hidden, weight, labels, dist.group.WORLD, lora=lora)


@ranks(2)
def test_teacher_adapter_of_other_rows_on_one_rank_is_refused():
    hidden, weight, a, b, _ = drawn()
    own = VocabShard.split(V, dist.group.WORLD)
    weight, rows = weight[own.start : own.stop], own.stop - dist.get_rank()
    teacher = LmHead(weight, dist.group.WORLD, lora=LoRA(a, b[own.start : rows]))
    said = "B must have a row for each" if dist.get_rank() == 1 else "another rank of tp_group refused"
    with pytest.raises(ValueError, match=said):
        LmHead(weight, dist.group.WORLD).read(hidden, KL(Teacher(teacher, hidden)))
