"""The weight gradient straight into `main_grad`, by Megatron's protocol."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_ext import linear_cross_entropy, linear_log_probs, reference
from megatron_ext.head import linear_gather_log_probs
from tests.head.problems import Problem, error
from tests.ranks import ranks


def parameter(weight, start=0.5, listens=True):
    weight = torch.nn.Parameter(weight.detach().clone())
    weight.main_grad = torch.full(weight.shape, start, dtype=torch.float32)
    if listens:
        weight.grad_added_to_main_grad = False
    return weight


@ranks(1, 2)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
@pytest.mark.parametrize("cache", [0, 0.5, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_added_in_fp32(dtype, cache, layout):
    """Two micro-batches add up in fp32 on top of what is there; `weight.grad` holds none of it. What is there is so
    large that a sum rounded to bf16 would hold little of what is added."""
    group, start = dist.group.WORLD, 0.5 if dtype == torch.float32 else 64.0
    problem = Problem((4, 8), 16, 60, dtype, options={"label_smoothing": 0.1})
    truth = problem.pieces(problem.truth("loss")[1], group, layout)
    hidden, shard, _ = problem.mine(group, layout)
    weight = parameter(shard, start)
    fired = []
    weight.register_post_accumulate_grad_hook(lambda w: fired.append(w.grad.dtype))
    for _ in range(2):
        hidden.grad = None
        loss = linear_cross_entropy(
            hidden,
            weight,
            problem.labels,
            group,
            layout,
            vocab=problem.shard(group),
            label_smoothing=0.1,
            cache=cache,
            chunk_tokens=5,
            gradient_accumulation_fusion=True,
        )
        loss.backward(problem.grad)
        assert weight.grad_added_to_main_grad
        weight.grad = None
    assert fired == [dtype, dtype], "the hooks of Megatron's DDP must fire"
    own = problem.ours("loss", group, layout, cache=cache, chunk_tokens=5)[1]
    allowed = 1.1 * error(own[1], truth[1]) + 1e-6
    assert error(weight.main_grad.double() - start, 2 * truth[1]) < allowed
    assert error((start + 2 * truth[1]).bfloat16().double() - start, 2 * truth[1]) > 10 * allowed
    torch.testing.assert_close(hidden.grad, own[0])


def test_the_dummy_gradient():
    """Zeros where the weight asks for it (it is shared), no gradient at all where nobody listens."""
    problem = Problem(dtype=torch.float32)
    for shared, listens in ((False, True), (True, True), (False, False)):
        weight = parameter(problem.weight, listens=listens)
        weight.zero_out_wgrad = shared
        loss = linear_log_probs(problem.hidden, weight, problem.labels, gradient_accumulation_fusion=True)
        loss.sum().backward()
        assert (weight.grad is not None) == listens
        if shared:
            assert not weight.grad.any()


def test_frozen_weight_needs_no_main_grad():
    problem = Problem(dtype=torch.float32)
    hidden = problem.hidden.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, problem.weight, problem.labels, gradient_accumulation_fusion=True)
    loss.backward(problem.grad)
    assert error(hidden.grad, problem.truth("loss")[1][0]) < 1e-6


def test_missing_main_grad():
    problem = Problem(dtype=torch.float32)
    _, weight, _ = problem.mine(None)
    with pytest.raises(ValueError, match="gradient_accumulation_fusion=True but weight.main_grad is missing"):
        linear_cross_entropy(problem.hidden, weight, problem.labels, gradient_accumulation_fusion=True)


def test_under_autocast():
    """The parameter is wider than what is computed: its own main_grad is still the one."""
    problem = Problem(dtype=torch.float32)
    weight = parameter(problem.weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(problem.hidden, weight, problem.labels, gradient_accumulation_fusion=True)
    loss.backward(problem.grad)
    assert error(weight.main_grad - 0.5, problem.truth("loss")[1][1]) < 1e-2


def fused_call(call):
    """A problem, its hidden states and weight as leaves, and the head on hidden states, fused into main_grad."""
    problem = Problem(dtype=torch.float32)
    hidden, shard, _ = problem.mine(None)
    weight, ids = parameter(shard), torch.zeros(*problem.shape, 1, dtype=torch.int64)

    def run(hidden):
        if call == "cross entropy":
            return linear_cross_entropy(hidden, weight, problem.labels, gradient_accumulation_fusion=True)
        return linear_gather_log_probs(hidden, weight, ids, gradient_accumulation_fusion=True).squeeze(-1)

    return problem, hidden, weight, run


@pytest.mark.parametrize("how", ["recomputed", "offloaded"])
@pytest.mark.parametrize("call", ["cross entropy", "gathered"])
def test_where_hooks_hand_back_another_object(call, how):
    """The parameter's main_grad gets the gradient, and the parameter is told: the other object lacks its attributes."""
    problem, hidden, weight, run = fused_call(call)
    if how == "recomputed":
        found = checkpoint(run, hidden, use_reentrant=False)
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            found = run(hidden)
    found.backward(problem.grad)
    assert weight.grad_added_to_main_grad
    leaves = [x.double().detach().requires_grad_() for x in (problem.hidden, problem.weight)]
    z = reference.logits(*leaves)
    truth = reference.cross_entropy(z, problem.labels) if call == "cross entropy" else z.log_softmax(-1)[..., 0]
    dx, dw = torch.autograd.grad(truth, leaves, problem.grad.double())
    assert error(weight.main_grad - 0.5, dw) < 1e-5
    assert error(hidden.grad, dx) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("call", ["cross entropy", pytest.param("gathered", marks=pytest.mark.slow)])
def test_compiled(call):
    """A compiled backward can set no attribute, so forward tells Megatron already: else it would add the dummy."""
    torch._dynamo.reset()
    problem, hidden, weight, run = fused_call(call)
    run(hidden).backward(problem.grad)
    once, dx = weight.main_grad - 0.5, hidden.grad
    weight.grad_added_to_main_grad, hidden.grad = False, None
    whole = torch.__version__ >= (2, 11)  # before, a traced backward sees no main_grad: the function runs as it is
    torch.compile(run, backend="aot_eager", fullgraph=whole)(hidden).backward(problem.grad)
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad - 0.5, 2 * once)
    torch.testing.assert_close(hidden.grad, dx)
