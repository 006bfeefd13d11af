"""The head on CUDA: Triton's passes without a flag, the same bits in each run, no host sync, CUDA graphs, and labels
that are checked on the device.

`pytest -m gpu --rehearse` runs the same lines on the CPU, at toy sizes: see `tests/head/as_on_cuda.py`.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_ext import linear_cross_entropy, linear_log_probs, vocab_parallel_cross_entropy
from megatron_ext.head import LmHead, Logits, Sampled, TopK
from megatron_ext.head.call import chunk_sizes
from megatron_ext.head.row_passes import label_terms, passes
from tests.devices import GPU
from tests.head.problems import OPTIONS, Problem, error

pytestmark = [pytest.mark.gpu, pytest.mark.rehearsed]

ON_GPU = torch.cuda.is_available()
ROOT = Path(__file__).parents[2]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KERNELS = {
    "whole_row_kernel",
    "_combined_kernel",
    "columns_kernel",
    "ids_exist_kernel",
    "_token_gradient_kernel",
    "_finish_dx_kernel",
    "_label_rows_kernel",
}
CALLS = ["linear_cross_entropy", "linear_log_probs", "vocab_parallel_cross_entropy"]
DEFAULT = "linear_cross_entropy by default"


def on_cuda(problem):
    for name in ("hidden", "weight", "bias", "labels", "grad", "grad_entropy"):
        x = getattr(problem, name)
        setattr(problem, name, None if x is None else x.to(GPU))
    return problem


def step(name, leaves, labels, grad):
    """Loss and gradients, all options on, with chunks that cut the tokens unevenly; or none at all."""
    hidden, weight, bias = leaves
    if name == DEFAULT:
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
        return [loss, *torch.autograd.grad(loss, leaves, grad)]
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


def drawn(name=None, seed=0):
    """Leaves, labels and an upstream gradient; for the default so many tokens that half of the columns are kept."""
    shape = (8, 5) if name == DEFAULT else (4, 5)
    problem = on_cuda(Problem(shape, dtype=torch.bfloat16, options={"bias": True}, seed=seed))
    return problem.mine(None), problem.labels, problem.grad


@pytest.fixture
def no_look_at_memory(monkeypatch):
    """Fail where free memory is asked for, which changes from run to run."""

    def refuse(device=None):
        raise AssertionError("asked for free memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)


@pytest.mark.parametrize("name", CALLS)
def test_cuda_tensors_take_the_triton_passes(name, monkeypatch):
    plain = (passes, "row_statistics", "row_gradient"), (label_terms, "add_label_rows", "finish_dx")
    for side, *functions in plain:
        for function in functions:
            monkeypatch.delattr(side, function)
    _, kernels = kernels_run(lambda: step(name, *drawn()))
    assert kernels


def kernels_run(run):
    """Return what `run` returns, and the names of the Triton kernels that the device or the interpreter ran."""
    if ON_GPU:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            found = run()
            torch.cuda.synchronize()
        return found, {event.key for event in profile.key_averages()}
    from triton.runtime.interpreter import InterpretedFunction

    names, launch = set(), InterpretedFunction.run

    def seen(kernel, *args, **kwargs):
        names.add(kernel.__name__)
        return launch(kernel, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(InterpretedFunction, "run", seen)
        return run(), names


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[1:3], ids=str)
@pytest.mark.parametrize("options", OPTIONS if ON_GPU else ["plain", "all"])
def test_values_and_gradients(options, dtype):
    shape = ((12, 16), 32, 301) if ON_GPU else ((3,), 8, 41)
    slack = 1.1 if ON_GPU else 2  # of few numbers, one rounding is a large part
    problem = on_cuda(Problem(*shape, dtype, options=OPTIONS[options]))
    for what in ("loss", "log_probs"):
        rounding = 1e-12 if dtype == torch.float64 else 8 * torch.finfo(torch.float32).eps
        for cache, chunk_tokens in ((0, None), (0.5, 50), (1, None)):
            found, kernels = kernels_run(
                partial(problem.beside_plain, what, None, cache=cache, chunk_tokens=chunk_tokens)
            )
            expected = KERNELS if cache == 1 else KERNELS | {"_row_gradient_kernel"}
            assert expected <= kernels, (what, cache)
            for ours, truth, theirs in found:
                assert error(ours, truth) <= slack * error(theirs, truth) + rounding, (what, cache)
                if ours.shape == problem.shape:  # of logits that nobody rounded to 16 bits
                    assert error(ours, truth) <= max(rounding, 2**-16), (what, cache)


@pytest.mark.parametrize("name", [*CALLS, DEFAULT])
def test_the_same_bits_in_each_run(name, no_look_at_memory):
    """Many tokens have one label, and torch's deterministic mode objects to nothing."""
    leaves, labels, grad = drawn(name)
    labels[1:3] = 5
    first = step(name, leaves, labels, grad)
    torch.use_deterministic_algorithms(True)
    try:
        again = step(name, leaves, labels, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", [*CALLS, DEFAULT])
def test_no_host_sync(name):
    arguments = drawn(name)
    step(name, *arguments)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(name, *arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", [*CALLS, DEFAULT])
def test_cuda_graph(name, no_look_at_memory):
    (leaves, labels, grad), (others, other_labels, other_grad) = drawn(name), drawn(name, seed=1)
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
    torch.testing.assert_close([x.detach() for x in found], [x.detach() for x in want], rtol=0, atol=0)


def test_auto_keeps_all_where_memory_is_free():
    chunk_sizes._columns_that_fit.cache_clear()
    (hidden, weight, bias), labels, grad = drawn()
    results = []
    for cache in ("auto", 1):
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, cache=cache)
        results.append([loss, *torch.autograd.grad(loss, (hidden, weight, bias), grad)])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


@pytest.mark.rehearsed(branches=False)
@pytest.mark.parametrize("name", CALLS if ON_GPU else ["linear_log_probs"])
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
    for plain, compiled in zip(*results, strict=True):
        # The same kernels: fp32 results differ by the order of a few operations per token, gradients by one rounding.
        ulp = 1e-5 if plain.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(compiled, plain, rtol=ulp, atol=ulp * float(plain.abs().max()))


@pytest.mark.parametrize("label", [-1, 41])
def test_a_label_out_of_range_stops_the_device(label):
    """The call has a process of its own: CUDA is of no use after a device-side assertion."""
    script = f"""
import contextlib, torch
from megatron_ext import linear_cross_entropy
from tests.head.as_on_cuda import rehearsal
with contextlib.nullcontext() if torch.cuda.is_available() else rehearsal():
    labels = torch.tensor([0, {label}, -100], device="{GPU}")
    loss = linear_cross_entropy(torch.randn(3, 8, device="{GPU}"), torch.randn(41, 8, device="{GPU}"), labels)
    torch.cuda.synchronize()
print("got away")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={**os.environ}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "got away" not in done.stdout
    assert "assert" in done.stderr.lower()


@pytest.mark.parametrize("cache", [1, 0.5])
def test_rows_wider_than_a_program(cache):
    """Exponentials are relative to the row's first block: its maximum is near, 12 above at a token's last column, and
    48 above, where they are written again."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 16, generator=generator)
    weight, labels = 0.4 * torch.randn(50257, 16, generator=generator), torch.arange(5)
    weight[-1], weight[-2] = 20 * hidden[0] / hidden[0].square().sum(), 60 * hidden[1] / hidden[1].square().sum()
    leaves = [x.to(GPU, torch.bfloat16).requires_grad_() for x in (hidden, weight)]
    truth = [x.detach().cpu().double().requires_grad_() for x in leaves]
    loss = linear_cross_entropy(*leaves, labels.to(GPU), cache=cache)
    true = torch.nn.functional.cross_entropy(truth[0] @ truth[1].t(), labels, reduction="none")
    torch.testing.assert_close(loss.detach().cpu().double(), true.detach(), rtol=1e-5, atol=1e-5)
    ours, theirs = torch.autograd.grad(loss.sum(), leaves), torch.autograd.grad(true.sum(), truth)
    # Kept exponentials, the gradient matrix and, of dW, the scaled hidden states are bf16.
    for found, expected, allowed in zip(ours, theirs, (2**-7, 3 * 2**-8), strict=True):
        far = (found.cpu().double() - expected).norm(dim=1)
        rows = expected.norm(dim=1) > 1e-3  # of dW those of words that have some probability
        assert (far[rows] < allowed * expected.norm(dim=1)[rows]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("of", ["hidden states", "logits"])
def test_chosen_and_sampled(of, dtype):
    """Top-k, top-p and their log-probabilities, whose kernels sort nothing, beside those in fp64 on the CPU."""
    problem = Problem((6, 5) if ON_GPU else (5,), 8, 300 if ON_GPU else 70, dtype)
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    labels = (hidden.double() @ weight.double().t()).argmax(-1)
    found = []
    for device, to in ((GPU, dtype), ("cpu", torch.float64)):
        leaves = [x.to(device, to).requires_grad_() for x in (hidden, weight)]
        of_hidden = of == "hidden states"
        source = LmHead(leaves[1]) if of_hidden else Logits((leaves[0] @ leaves[1].t()).to(dtype).to(to))
        asked = TopK(5), Sampled(labels.to(device), top_k=7), Sampled(labels.to(device), top_p=0.8)
        (values, ids), *sampled = source.read(*leaves[:of_hidden], *asked)
        total = sum(
            (x * torch.linspace(1, 2, x.numel(), device=device).view(x.shape)).sum() for x in (values, *sampled)
        )
        found.append([ids, values, *sampled, *torch.autograd.grad(total, leaves)])
    (ids, *results, dx, dw), (true_ids, *truth, true_dx, true_dw) = found
    assert ids.cpu().equal(true_ids)
    for ours, true in zip(results, truth, strict=True):
        torch.testing.assert_close(ours.detach().cpu().double(), true.detach(), rtol=1e-5, atol=1e-5)
    for ours, true in ((dx, true_dx), (dw, true_dw)):
        assert error(ours.cpu(), true) < (2**-7 if dtype == torch.bfloat16 else 1e-5) * 4


def test_twins_agree():
    from tests.head import twins

    twins.main(GPU, every=1 if ON_GPU else 20)


@pytest.mark.parametrize("cache", [1, 0])
def test_more_logits_than_a_32_bit_number_counts(cache):
    """The last tokens have the losses and gradients that they have alone, and so has dW; a GPU takes the full size."""
    tokens, columns, width = (20480, 128256, 64) if ON_GPU else (24, 304, 16)
    assert not ON_GPU or tokens * columns > 1 << 31
    generator = torch.Generator(GPU).manual_seed(0)
    like = {"generator": generator, "device": GPU, "dtype": torch.float32}
    x = torch.randn(tokens, width, **like).bfloat16().requires_grad_()
    w = (torch.randn(columns, width, **like) / width**0.5).bfloat16().requires_grad_()
    labels = torch.randint(columns, (tokens,), generator=generator, device=GPU)
    labels[-1], grad = columns - 1, torch.zeros(tokens, device=GPU)
    last = slice(tokens - 8, tokens)
    grad[last] = 1.0
    loss = linear_cross_entropy(x, w, labels, cache=cache)
    dx, dw = torch.autograd.grad(loss, [x, w], grad)
    few = x[last].detach().requires_grad_()
    want = linear_cross_entropy(few, w, labels[last], cache=1)
    want_dx, want_dw = torch.autograd.grad(want, [few, w], grad[last])
    torch.testing.assert_close(loss[last], want, rtol=1e-5, atol=1e-5)
    assert not dx[: tokens - 8].any()
    for found, wanted in ((dx[last], want_dx), (dw, want_dw)):
        assert error(found, wanted.double()) < 2.0**-7
