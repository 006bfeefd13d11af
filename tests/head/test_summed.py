"""Sums and means of losses, whose gradients forward makes chunk by chunk and backward scales."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from benchmarks.meter import measure, one_rank_of
from megatron_ext import linear_cross_entropy, linear_log_probs
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import group_size
from megatron_ext.head import Entropy, LmHead, LogProbs, LoRA, TopK
from megatron_ext.head.call.chunk_sizes import summed_chunks
from tests.head.problems import OPTIONS, Problem, error
from tests.marks import quick_if
from tests.ranks import ranks

FACTOR = 3.0


def truth_of(problem, reduction):
    """The loss, and its gradients for hidden states, weight and bias, by plain PyTorch in fp64."""
    counts = (problem.labels != problem.ignore_index).double()
    problem.grad = FACTOR * counts / (counts.sum() if reduction == "mean" else 1.0)
    (losses,), grads = problem.truth("loss")
    return (losses * problem.grad).sum() / FACTOR, tuple(grads)


def summed(problem, group, layout="replicated", leaves=None, **more):
    """The loss, made by the function of sums, and the leaves that it has gradients for."""
    leaves = problem.mine(group, layout) if leaves is None else leaves
    options = {"vocab": problem.shard(group), "bias": leaves[2], "chunk_tokens": 6, "reduction": "mean"}
    options |= problem.arguments | more
    loss = linear_cross_entropy(*leaves[:2], problem.labels, group, layout, **options)
    assert loss.grad_fn.name() == "SummedHeadBackward"
    return loss, [x for x in leaves if x is not None]


@ranks(1, 2)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_plain_pytorch(name):
    group, problem = dist.group.WORLD, Problem(options=OPTIONS[name])
    for layout in ("replicated", "sequence")[: group_size(group)]:
        for reduction in ("mean", "sum"):
            loss, leaves = summed(problem, group, layout, reduction=reduction)
            truth, grads = truth_of(problem, reduction)
            torch.testing.assert_close(loss.detach(), truth)
            found = torch.autograd.grad(loss * FACTOR, leaves)
            torch.testing.assert_close([*found], problem.pieces(list(grads), group, layout))


@ranks(1, 2)
@pytest.mark.parametrize("tokens", [192, 7.3])
@pytest.mark.parametrize("size, sure", [(0.05, False), (1.0, True), (8.0, True)])
def test_errors_in_16_bits_are_those_of_plain_pytorch(size, sure, tokens):
    """Also where the factor, as a loss scale over a number of tokens, is no power of two: dx is rounded once."""
    group, problem = dist.group.WORLD, Problem((192,), 48, 701, torch.bfloat16, logit_size=size)
    if sure:
        problem.labels = (problem.hidden.double() @ problem.weight.double().t()).argmax(-1)
    problem.grad = torch.full((192,), 1 / tokens).where(problem.labels != -100, 0.0)
    (_, truth), (_, plain) = problem.truth("loss"), problem.plain("loss", group_size(group))
    loss, leaves = summed(problem, group, chunk_tokens=50, reduction="sum")
    found = torch.autograd.grad(loss / tokens, leaves)
    parts = [problem.pieces(grads, group, "replicated") for grads in (truth, plain)]
    for own, right, theirs in zip(found, *parts, strict=True):
        assert error(own, right) <= 1.1 * error(theirs, right)


@ranks(1, 2)
def test_lora_frozen_parts_and_tied_weights():
    """Each part alone has its gradient, and no other one is made; a weight that is used twice has both."""
    group, problem = dist.group.WORLD, Problem()
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 8), (41, 3)))
    shard = problem.shard(group)
    whole = [x.detach().requires_grad_() for x in (problem.hidden, problem.weight, a, b)]
    z = whole[0] @ (whole[1] + 0.5 * whole[3] @ whole[2]).t()
    truth = torch.nn.functional.cross_entropy(z.flatten(0, 1), problem.labels.flatten())
    grads = torch.autograd.grad(truth, whole)
    for wanted in ((0, 1, 2, 3), (0,), (1,), (0, 2, 3)):
        hidden, weight, _ = problem.mine(group, grads=(0 in wanted, 1 in wanted))
        own = [a.clone().requires_grad_(2 in wanted), b[shard.start : shard.stop].clone().requires_grad_(3 in wanted)]
        loss, _ = summed(problem, group, leaves=(hidden, weight, None), lora=LoRA(*own, 0.5))
        torch.testing.assert_close(loss.detach(), truth.detach())
        leaves = [x for x in (hidden, weight, *own) if x.requires_grad]
        parts = [grads[0], grads[1][shard.start : shard.stop], grads[2], grads[3][shard.start : shard.stop]]
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), tuple(parts[at] for at in wanted))
    if group_size(group) == 1:
        weight = problem.weight.clone().requires_grad_()
        tied = torch.nn.functional.embedding(problem.labels.clamp(min=0), weight)
        loss, _ = summed(problem, None, leaves=(tied, weight, None))
        found = torch.autograd.grad(loss, weight, retain_graph=True)
        losses = torch.nn.functional.cross_entropy((tied @ weight.t()).flatten(0, 1), problem.labels.flatten())
        torch.testing.assert_close(found, torch.autograd.grad(losses, weight))


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_is_written_by_backward_alone(dtype):
    group, problem = dist.group.WORLD, Problem((8, 5), dtype=dtype)
    leaves = problem.mine(group)
    weight = torch.nn.Parameter(leaves[1].detach().clone())
    weight.main_grad = torch.full(weight.shape, 0.5)
    weight.grad_added_to_main_grad = False
    loss, _ = summed(problem, group, leaves=(leaves[0], weight, None), gradient_accumulation_fusion=True)
    assert torch.equal(weight.main_grad, torch.full(weight.shape, 0.5))
    assert not weight.grad_added_to_main_grad
    (loss * FACTOR).backward()
    assert weight.grad_added_to_main_grad
    plain, own = summed(problem, group)
    (_, wanted) = torch.autograd.grad(plain * FACTOR, own)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    torch.testing.assert_close(weight.main_grad - 0.5, wanted.float(), **close)


def test_backward_can_be_repeated_with_any_factor():
    problem = Problem(options={"bias": True})
    loss, leaves = summed(problem, None)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss * 2, leaves, retain_graph=True)
    torch.testing.assert_close(again, tuple(2 * x for x in first))
    nothing = torch.autograd.grad(loss * 0, leaves, retain_graph=True)
    assert not any(x.any() for x in nothing)
    for factor in (torch.inf, torch.nan):
        found = torch.autograd.grad(loss * factor, leaves, retain_graph=True)
        for x, of_one in zip(found, first, strict=True):
            torch.testing.assert_close(x, of_one * factor, equal_nan=True)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, leaves)


def test_without_a_backward_and_when_recomputed():
    problem = Problem()
    hidden, weight, _ = problem.mine(None)
    call = partial(linear_cross_entropy, labels=problem.labels, chunk_tokens=6, reduction="mean")
    with torch.no_grad():
        value = call(hidden, weight)
    assert not value.requires_grad
    assert not call(hidden.detach(), weight.detach()).requires_grad
    loss = checkpoint(call, hidden, weight, use_reentrant=False)
    torch.testing.assert_close(loss.detach(), value)
    truth, grads = truth_of(problem, "mean")
    torch.testing.assert_close(value, truth)
    torch.testing.assert_close(torch.autograd.grad(loss * FACTOR, (hidden, weight)), grads)


def test_second_derivatives_are_refused():
    problem = Problem()
    hidden, *others = problem.mine(None)
    loss, given = summed(problem, None, leaves=[hidden * 2, *others])
    (found, *_) = torch.autograd.grad(loss, given, create_graph=True)
    for asked in (given[0], hidden, given[1]):
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(loss + found.sum(), asked, retain_graph=True)


TODAYS = {
    "least memory": {"cache": 0},
    "exponentials are kept": {"cache": 0.5},
    "all are by default": {},
    "fixed bits": {"bits": "batch"},
    "a mask with a gradient": {"loss_mask": torch.ones(2, 8, dtype=torch.float64, requires_grad=True)},
    "a bound of tokens": {"skip_ignored": 16},
}


@pytest.mark.parametrize("name", TODAYS)
def test_other_calls_make_their_gradient_in_backward(name):
    problem = Problem((2, 4) if name == "all are by default" else (2, 8))
    leaves = problem.mine(None)[:2]
    options = {"reduction": "mean"} | TODAYS[name]
    loss = linear_cross_entropy(*leaves, problem.labels, **options)
    assert loss.grad_fn.name() != "SummedHeadBackward"
    truth, grads = truth_of(problem, "mean")
    torch.testing.assert_close(loss.detach(), truth)
    torch.testing.assert_close(torch.autograd.grad(loss * FACTOR, leaves), grads)


def test_half_precision_keeps_its_range():
    """The gradient is made in backward, where the loss scale is known."""
    problem = Problem((8, 5), dtype=torch.float16)
    loss = linear_cross_entropy(*problem.mine(None)[:2], problem.labels, reduction="mean")
    assert loss.grad_fn.name() != "SummedHeadBackward"


def test_many_tokens_take_it_by_default():
    problem = Problem((200,), 4)
    loss, leaves = summed(problem, None, chunk_tokens=None)
    torch.testing.assert_close(torch.autograd.grad(loss * FACTOR, leaves), truth_of(problem, "mean")[1])


@ranks(1, 2)
def test_weighed_log_probs():
    """`LmHead.read` takes the weights of any sum, in either way to its gradient."""
    group, problem = dist.group.WORLD, Problem()
    weights = torch.randn(problem.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    hidden, weight, _ = problem.mine(group)
    call = {"vocab": problem.shard(group), "chunk_tokens": 6}
    wanted = (linear_log_probs(hidden, weight, problem.labels, group, **call) * weights).sum()
    grads = torch.autograd.grad(wanted, (hidden, weight))
    for cache in ("bounded", 0, 1):
        head = LmHead(weight, group, cache=cache, **call)
        found = head.read(hidden, LogProbs(problem.labels), weights=weights)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), grads)
    found = LmHead(weight, group, **call).read(hidden, Entropy(), weights=weights)
    assert found.shape == ()


def test_weights_that_break_a_rule():
    problem = Problem()
    hidden, weight, _ = problem.mine(None)
    read, weights = partial(LmHead(weight).read, hidden), torch.ones(problem.shape)
    labels = LogProbs(problem.labels)
    for given, readouts, said in (
        (weights, [labels, Entropy()], "weights are given and LogProbs, Entropy is read"),
        (weights, [TopK(2)], "weights are given and TopK is read"),
        (weights[:2], [labels], r"weights is \(2, 5\) of torch.float32: it must be a floating tensor"),
        (weights.long(), [labels], r"weights is \(4, 5\) of torch.int64"),
        (1.0, [labels], "weights is 1.0"),
        (weights.requires_grad_(), [labels], "weights requires a gradient"),
    ):
        with pytest.raises(ValueError, match=said):
            read(*readouts, weights=given)


@ranks(2)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_one_exchange_a_chunk_tells_of_faults(layout):
    """Another label, option, weight or shard on one rank is raised on both, by the first exchange."""
    group, problem, rank = dist.group.WORLD, Problem((4, 6)), dist.get_rank()
    with count_collectives() as sent:
        loss, leaves = summed(problem, group, layout)
    assert sum(sent.values()) == 4 + (layout == "sequence")
    with count_collectives() as sent:
        torch.autograd.grad(loss, leaves)
    assert sum(sent.values()) == 1
    call = partial(summed, problem, group, layout)
    with pytest.raises(ValueError, match="options are not the same"):
        call(label_smoothing=0.1 * (rank + 1))
    with pytest.raises(ValueError, match=f"gradients made in forward by chunks of {6 - rank} tokens"):
        call(chunk_tokens=6 - rank)  # 4 chunks on both
    for in_backward in ({"cache": 0}, {"reduction": "none"}):  # on one rank alone, which sends all tokens at once
        hidden, weight, _ = problem.mine(group, layout)
        options = {"vocab": problem.shard(group), "chunk_tokens": 6, "reduction": "mean"}
        if rank:
            options |= in_backward
        with pytest.raises(ValueError, match="options are not the same") as raised:
            linear_cross_entropy(hidden, weight, problem.labels, group, layout, **options)
        assert ("gradients made in forward by chunks of 6 tokens" in str(raised.value)) == (rank == 0)
    right = problem.labels
    problem.labels = right.clone()
    problem.labels[3, 0] = (right[3, 0].clamp(min=0) + rank) % 41
    with pytest.raises(ValueError, match="labels are not the same"):
        call()
    problem.labels = right
    hidden, weight, _ = problem.mine(group, layout)
    weight = weight.detach()[:, : 8 - rank].requires_grad_()
    with pytest.raises(ValueError, match="another rank of tp_group refused" if rank == 0 else "hidden|weight"):
        call(leaves=(hidden, weight, None))
    call()


SIZES = (2048, 512, 8192)
CALLS = {
    "plain": {},
    "label smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 30.0, "z_loss": 0.01},
}


@pytest.mark.parametrize("layout", ["replicated", "sequence"])
@pytest.mark.parametrize("name", quick_if("plain".__eq__, CALLS))
def test_costs(name, layout):
    """6 NVH, one exchange a chunk; memory of dW in fp32 and of a chunk of exponentials; 4 with a frozen weight."""
    (tokens, width, vocabulary), count = SIZES, 4
    for frozen, products in ((False, 6), (True, 4)):
        with one_rank_of(count) as group:
            rows = tokens // count if layout == "sequence" else tokens
            hidden = torch.empty(rows, width, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.empty(vocabulary // count, width, dtype=torch.bfloat16, requires_grad=not frozen)
            call = {"reduction": "mean", **CALLS[name]}
            labels = torch.zeros(tokens, dtype=torch.int64)
            with measure() as found:
                linear_cross_entropy(hidden, weight, labels, group, layout, **call).backward()
        chunks = len(summed_chunks(tokens, None, hidden, name == "softcap"))
        assert found.flops == products * tokens * width * vocabulary // count
        assert found.collectives.total() == chunks + 1 + (layout == "sequence")
        logits, whole = tokens * vocabulary // count, tokens * width
        most = 6 * weight.numel() * (not frozen) + 2.6 * logits / chunks + 14 * whole
        assert found.peak_bytes <= most
