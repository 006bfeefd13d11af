"""torch.compile takes the whole head, forward and backward, in one graph: the numbers of the plain run."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import AotEagerAndRecordGraphs

from megatron_ext import (
    linear_cross_entropy,
    linear_log_probs,
    reference,
    token_log_probs,
    vocab_parallel_cross_entropy,
)
from megatron_ext.head import KL, Entropy, LmHead, Teacher
from megatron_ext.head.readouts import read_out
from tests.head.problems import Problem
from tests.ranks import ranks

pytestmark = pytest.mark.slow


def divergence(hidden, weight, labels, group, layout, **options):
    """The compiler refuses outputs of forward in whose memory its products lie: nothing is kept then."""
    teacher = Teacher(LmHead(weight.detach() / 2, group, layout, vocab=options["vocab"]), hidden.detach())
    return LmHead(weight, group, layout, **options).read(hidden, KL(teacher))


BENDS = {"softcap": 2.0, "temperature": 0.7}
EVERYTHING = {**BENDS, "label_smoothing": 0.1, "z_loss": 0.01}
# Each function with its options: all that change what is computed, or none.
CALLS = {
    "linear_cross_entropy": (linear_cross_entropy, {**EVERYTHING, "cache": 0.5, "chunk_tokens": 20}),
    "linear_log_probs": (linear_log_probs, {"return_entropy": True, "return_hits": True, "cache": 1}),
    "vocab_parallel_cross_entropy": (vocab_parallel_cross_entropy, {**EVERYTHING, "chunk_tokens": 10}),
    "token_log_probs": (token_log_probs, {**BENDS, "return_entropy": True, "return_hits": True}),
    "linear, summed": (linear_cross_entropy, {**EVERYTHING, "chunk_tokens": 10, "reduction": "mean"}),
    "linear, divergence": (divergence, BENDS),
}


def call(name, problem, group, layout, *leaves):
    """Results of the function: of hidden states, weight and bias, or of the logits they make."""
    function, options = CALLS[name]
    options = {**options, "vocab": problem.shard(group)}
    if name.startswith("linear"):
        return function(*leaves[:2], problem.labels, group, layout, bias=leaves[2], **options)
    return function(reference.logits(*leaves), problem.labels, group, **options)


def run(function, leaves):
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    differentiable = [x for x in results if x.requires_grad]
    torch.manual_seed(0)
    grads = torch.autograd.grad(differentiable, leaves, [torch.randn_like(x) for x in differentiable])
    return [*(x.detach() for x in results), *grads]


def check(name, layout, dtype, backend, group):
    torch._dynamo.reset()
    problem = Problem(dtype=dtype, options={"bias": True, "size": 37})
    function, leaves = partial(call, name, problem, group, layout), problem.mine(group, layout)
    found = run(torch.compile(function, fullgraph=True, backend=backend), leaves)
    close = {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    torch.testing.assert_close(found, run(function, leaves), **close)


# One rank compiles what two do, without the collectives; both layouts are one there. Each function once, as inductor
# takes up to half a minute of two cores for one: both layouts and types are met.
@ranks(2)
@pytest.mark.parametrize(
    "name, layout, dtype",
    [
        ("linear_cross_entropy", "sequence", torch.float32),
        ("linear_log_probs", "replicated", torch.bfloat16),
        ("vocab_parallel_cross_entropy", "replicated", torch.bfloat16),
        ("token_log_probs", "replicated", torch.float32),
    ],
    ids=str,
)
def test_compiled_code(name, layout, dtype):
    check(name, layout, dtype, "inductor", dist.group.WORLD)


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_forward_makes(dtype):
    for layout in ("replicated", "sequence"):
        check("linear, summed", layout, dtype, "aot_eager", dist.group.WORLD)
    check("linear, divergence", "replicated", torch.float32, "aot_eager", dist.group.WORLD)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_read_outs_are_copied_by_name_before_torch_2_13(monkeypatch):
    """`torch.compile` of PyTorch before 2.13 traces no `copy.copy` of an object."""
    monkeypatch.setattr(read_out, "TRACES_COPIES", False)
    check("linear_log_probs", "replicated", torch.float32, AotEagerAndRecordGraphs(), group=None)
    hidden, weight, counts = torch.randn(40, 8, requires_grad=True), torch.randn(11, 8), torch.arange(40) % 3 > 0
    labels = torch.arange(40) % 11

    def call(hidden):
        entropy = LmHead(weight).read(hidden, Entropy(counts))
        loss = linear_cross_entropy(hidden, weight, labels, reduction="mean", chunk_tokens=16)
        return entropy, loss

    plain, compiled = call(hidden), torch.compile(call, fullgraph=True, backend="eager")(hidden)
    torch.testing.assert_close(compiled, plain)
    assert plain[1].grad_fn.name() == "SummedHeadBackward"
    gradients = [torch.autograd.grad(loss, hidden) for _, loss in (plain, compiled)]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_each_pass_is_one_operator_of_the_graph():
    """A compiled call runs the passes that fit the device, Triton's on CUDA, as the plain run does."""
    backend = AotEagerAndRecordGraphs()
    check("vocab_parallel_cross_entropy", "replicated", torch.float32, backend, group=None)
    (forward,), (backward,) = backend.fw_graphs, backend.bw_graphs
    assert "torch.ops.megatron_ext.row_statistics" in forward.code
    assert "torch.ops.megatron_ext.row_gradient" in backward.code
    assert "tanh" not in forward.code + backward.code
