"""The head on CUDA: Triton's passes without a flag, no host sync, CUDA graphs, labels checked on the device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext import linear_cross_entropy, linear_log_probs, vocab_parallel_cross_entropy
from tests.head.problems import OPTIONS, Problem, error

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
CALLS = ["linear_cross_entropy", "linear_log_probs", "vocab_parallel_cross_entropy"]


def on_cuda(problem):
    for name in ("hidden", "weight", "bias", "labels", "grad", "grad_entropy"):
        x = getattr(problem, name)
        setattr(problem, name, None if x is None else x.cuda())
    return problem


def step(name, leaves, labels, grad):
    """Loss and gradients, all options on, with chunks that cut the tokens unevenly."""
    hidden, weight, bias = leaves
    options = {"softcap": 2.0, "temperature": 0.7, "chunk_tokens": 7}
    if name == "linear_cross_entropy":
        more = {"label_smoothing": 0.1, "z_loss": 0.01, "cache": 0.5}
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, **options, **more)
    elif name == "linear_log_probs":
        loss = sum(linear_log_probs(hidden, weight, labels, bias=bias, cache=1, return_entropy=True))
    else:
        logits = hidden @ weight.t() + bias
        loss = vocab_parallel_cross_entropy(logits, labels, label_smoothing=0.1, z_loss=0.01, **options)
    return [loss, *torch.autograd.grad(loss, leaves, grad)]


def drawn(seed=0):
    problem = on_cuda(Problem(dtype=torch.bfloat16, options={"bias": True}, seed=seed))
    return problem.mine(None), problem.labels, problem.grad


@pytest.mark.parametrize("name", CALLS)
def test_cuda_tensors_take_the_triton_passes(name, monkeypatch):
    from megatron_ext.head import rows
    from megatron_ext.head.kernels import rows as twin

    calls = []
    for side in (rows, twin):
        for function in ("row_statistics", "row_gradient"):
            run = getattr(side, function)
            seen = (side.__name__, function)
            monkeypatch.setattr(side, function, lambda *a, run=run, seen=seen: calls.append(seen) or run(*a))
    step(name, *drawn())
    assert set(calls) == {(twin.__name__, "row_statistics"), (twin.__name__, "row_gradient")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_gradients(options, dtype):
    problem = on_cuda(Problem((12, 16), 32, 301, dtype, options=OPTIONS[options]))
    for what in ("loss", "log_probs"):
        rounding = 1e-12 if dtype == torch.float64 else 8 * torch.finfo(torch.float32).eps
        (results, grads), (plain, plain_grads) = problem.truth(what), problem.plain(what, 1)
        for cache, chunk_tokens in ((0, None), (0.5, 50), (1, None)):
            got, got_grads = problem.ours(what, None, cache=cache, chunk_tokens=chunk_tokens)
            for ours, truth, theirs in zip(
                [*got[:2], *got_grads], [*results[:2], *grads], [*plain[:2], *plain_grads], strict=True
            ):
                assert error(ours, truth) <= 1.1 * error(theirs, truth) + rounding, (what, cache)


@pytest.mark.parametrize("name", CALLS)
def test_no_host_sync(name):
    arguments = drawn()
    step(name, *arguments)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(name, *arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CALLS)
def test_cuda_graph(name):
    """Captured once, replayed with other numbers: what a plain run makes of them."""
    (leaves, labels, grad), (others, other_labels, other_grad) = drawn(), drawn(seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(name, leaves, labels, grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(name, leaves, labels, grad)
    with torch.no_grad():
        for x, other in zip([*leaves, labels, grad], [*others, other_labels, other_grad], strict=True):
            x.copy_(other)
    graph.replay()
    want = step(name, others, other_labels, other_grad)
    torch.testing.assert_close([x.detach() for x in found], [x.detach() for x in want])


@pytest.mark.parametrize("name", CALLS)
def test_compiled(name):
    """One graph, in which the passes are operators that run Triton's kernels."""
    torch._dynamo.reset()
    leaves, labels, grad = drawn()
    hidden, weight, bias = leaves

    def run(hidden, weight, bias):
        if name == "vocab_parallel_cross_entropy":
            return vocab_parallel_cross_entropy(hidden @ weight.t() + bias, labels, softcap=2.0)
        function = linear_cross_entropy if name == "linear_cross_entropy" else linear_log_probs
        return function(hidden, weight, labels, bias=bias, softcap=2.0, cache=0.5)

    results = []
    for function in (run, torch.compile(run, fullgraph=True)):
        loss = function(hidden, weight, bias)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves, grad)])
    torch.testing.assert_close(*results, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("label", [-1, 41])
def test_a_label_out_of_range_stops_the_device(label):
    """In a process of its own: CUDA is of no use after a device-side assertion."""
    script = f"""
import torch
from megatron_ext import linear_cross_entropy
labels = torch.tensor([0, {label}, -100], device="cuda")
loss = linear_cross_entropy(torch.randn(3, 8, device="cuda"), torch.randn(41, 8, device="cuda"), labels)
torch.cuda.synchronize()
print("got away")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "got away" not in done.stdout
    assert "assert" in done.stderr.lower()


def test_twins_agree():
    from tests.head import twins

    twins.main("cuda")
