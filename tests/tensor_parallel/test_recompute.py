"""checkpoint(): the same numbers as without it, bit for bit, and nothing left behind."""

import functools
import gc
import threading
import weakref
from collections import namedtuple
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import random as stock
from torch.autograd.graph import saved_tensors_hooks

from megatron_ext.tensor_parallel import mappings, random
from megatron_ext.tensor_parallel.random import checkpoint
from megatron_on_cpu import megatron_on_cpu
from tests.ranks import ranks
from tests.tensor_parallel.sharded import no_tracker, numbers, seeded, world


def grads_of(run, *leaves):
    """`run()`, its sum differentiated: the result and every leaf's gradient."""
    for leaf in leaves:
        leaf.grad = None
    out = run()
    out.sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def assert_as_without(run, *leaves):
    """`run(recompute)` gives the same results and gradients with recomputation, from the same seed."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        results.append(grads_of(functools.partial(run, recompute), *leaves))
    assert_equal(*results)


@contextmanager
def saved_tensors():
    """Gives the list of the tensors that autograd keeps for operations inside."""
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        yield saved


class Block(torch.nn.Module):
    """A tensor-parallel MLP with dropout everywhere: the same on all ranks, and another in what they share out."""

    def __init__(self, sequence_parallel: bool, hidden: int = 8):
        super().__init__()
        rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size())
        self.sequence_parallel = sequence_parallel
        self.up = torch.nn.Parameter(numbers(2 * hidden, hidden, seed=1).chunk(size)[rank].clone())
        self.down = torch.nn.Parameter(numbers(hidden, 2 * hidden, seed=2).chunk(size, dim=1)[rank].clone())

    def forward(self, x_TD):
        enter, leave = mappings.copy_to_tensor_model_parallel_region, mappings.reduce_from_tensor_model_parallel_region
        if self.sequence_parallel:
            enter = mappings.gather_from_sequence_parallel_region
            leave = mappings.reduce_scatter_to_sequence_parallel_region
        inner_TF = torch.tanh(enter(x_TD, group=world()) @ self.up.t())
        with random.get_cuda_rng_tracker().fork():
            inner_TF = F.dropout(inner_TF, 0.3)
        return F.dropout(leave(inner_TF @ self.down.t(), group=world()), 0.2)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
@ranks(1, 2, 4)
def test_bitwise_as_without_with_dropout_and_forks(sequence_parallel):
    """Layer after layer, as a transformer block runs them: under sequence parallelism all inside a fork, which each
    layer forks again. A recomputation must know which stream was in use, or it draws an older state of it."""
    layers = torch.nn.ModuleList(Block(sequence_parallel) for _ in range(3))

    def stack(recompute, hidden):
        for layer in layers:
            hidden = checkpoint(layer, False, hidden) if recompute else layer(hidden)
        return hidden

    out = assert_bitwise_as_without(stack, layers, sequence_parallel)
    assert 0.5 < out.count_nonzero() / out.numel() < 0.98, "dropout was on"


def assert_bitwise_as_without(stack, layers, sequence_parallel):
    """`stack(recompute, x)`, under sequence parallelism inside a fork: results, gradients and what is drawn next."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    x = numbers(32, 8, seed=3)
    if sequence_parallel:
        x = x.chunk(size)[rank].clone()
    x.requires_grad_()

    def run(recompute):
        with seeded(7, tp_rank=rank, ep_rank=0, etp_rank=0) as tracker:

            def forward():
                with tracker.fork() if sequence_parallel else nullcontext():
                    return stack(recompute, x)

            grads = grads_of(forward, x, *layers.parameters())
            with tracker.fork():
                return [*grads, torch.rand(3), tracker.get_states()["expert-parallel-rng"]]

    plain, recomputed = run(False), run(True)
    assert_equal(recomputed, plain)
    assert not random.is_checkpointing()
    return plain[0]


def test_autocast_is_entered_again():
    linear, x = torch.nn.Linear(6, 6), numbers(4, 6, seed=1).requires_grad_()
    seen = []

    def function(x):
        y = linear(x)
        seen.append((y.dtype, torch.is_autocast_cache_enabled()))
        with torch.autocast("cpu", enabled=False):
            return y.float() @ linear.weight

    def run(recompute):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return checkpoint(function, False, x) if recompute else function(x)

    assert_as_without(run, x, linear.weight, linear.bias)
    assert seen == [(torch.bfloat16, False)] * 3


def test_a_backward_under_autocast_recomputes_what_ran_without():
    weight, x = torch.nn.Parameter(numbers(6, 6, seed=2)), numbers(4, 6, seed=1).requires_grad_()

    def run(recompute):
        x.grad = weight.grad = None
        out = checkpoint(lambda x: torch.tanh(x @ weight), False, x) if recompute else torch.tanh(x @ weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out.sum().backward()
        return [out.detach(), x.grad, weight.grad]

    assert_equal(run(True), run(False))


def test_recomputation_keeps_the_default_device():
    seen = []

    def function(x):
        seen.append(torch.get_default_device().type)
        return x.sin()

    x = numbers(3, seed=1).requires_grad_()
    with torch.device("meta"):
        y = checkpoint(function, False, x)
    y.sum().backward()
    plain = checkpoint(function, False, x)
    with torch.device("meta"):
        plain.sum().backward()
    assert seen == ["meta", "meta", "cpu", "cpu"]
    assert torch.equal(x.grad, 2 * x.cos())


def test_gradients_reach_parameters_behind_frozen_inputs():
    """Adapters: the input needs no gradient, a parameter inside does."""
    base, adapter, x = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), numbers(4, 6, seed=1)
    base.requires_grad_(False)

    def function(x):
        return base(x) + adapter(F.dropout(x, 0.5)), base(x)

    def run(recompute):
        out, frozen = checkpoint(function, False, x) if recompute else function(x)
        assert out.requires_grad
        assert not frozen.requires_grad
        return out + frozen

    assert_as_without(run, adapter.weight, adapter.bias)
    assert base.weight.grad is None


def test_where_nothing_needs_a_gradient_nothing_is_kept():
    frozen = torch.nn.Linear(6, 6).requires_grad_(False)
    x = numbers(4, 6, seed=1)
    out = checkpoint(lambda x: frozen(torch.tanh(x)), False, x)
    assert out.grad_fn is None
    assert not out.requires_grad
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    trainable = torch.nn.Linear(6, 6)
    with torch.no_grad():
        assert not checkpoint(trainable, False, numbers(4, 6, seed=1)).requires_grad


@pytest.mark.parametrize("frozen", [False, True], ids=["trained input", "frozen input"])
def test_only_the_inputs_are_kept(frozen):
    weight = torch.nn.Parameter(numbers(6, 6, seed=2))
    x, inner = numbers(4, 6, seed=1).requires_grad_(not frozen), []

    def function(x):
        h = torch.tanh(x @ weight)
        inner.append(weakref.ref(h))
        return torch.sin(h @ weight)

    with saved_tensors() as saved:
        out = checkpoint(function, False, x)
    assert sum(t.numel() for t in saved) - x.numel() == int(frozen)  # a frozen input has autograd's edge beside
    assert inner[0]() is None
    out.sum().backward()
    inner.clear()
    assert_equal(grads_of(lambda: checkpoint(function, False, x), weight), grads_of(lambda: function(x), weight))


Point = namedtuple("Point", "a b")


def test_containers_and_other_objects_go_in_and_come_out():
    x, y, z = (numbers(3, seed=i).requires_grad_() for i in range(3))
    marker = object()

    def function(first, point, number, /, *, options, nothing=None):
        assert number == 5
        assert nothing is None
        assert options["marker"] is marker
        h = F.dropout(first[0] * point.a + options["z"][0], 0.5)
        return {"h": h, "more": [h * number, (point.b, "text", None)], "point": Point(h.sin(), marker)}

    def run(recompute):
        arguments = ([x, torch.arange(3)], Point(y, torch.tensor([1, 2])), 5)
        keywords = {"options": {"z": (z,), "marker": marker}}
        out = checkpoint(function, False, *arguments, **keywords) if recompute else function(*arguments, **keywords)
        assert out["more"][1][1:] == ("text", None)
        assert out["more"][1][0].tolist() == [1, 2]
        assert type(out["point"]) is Point
        assert out["point"].b is marker
        return out["h"] * out["more"][0] + out["point"].a

    assert_as_without(run, x, y, z)


@pytest.mark.parametrize("returned", [None, 5, [], torch.arange(3)], ids=str)
def test_results_without_a_gradient(returned):
    """Backward raises no error where some or all of the results have no gradient."""
    x, unused = numbers(3, seed=0).requires_grad_(), torch.nn.Parameter(torch.ones(3))
    out = checkpoint(lambda x: returned, False, x)
    assert torch.equal(out, returned) if isinstance(returned, torch.Tensor) else out == returned
    checkpoint(lambda x: x.detach() * 2, False, x).sum().backward()
    assert x.grad is None
    mask, product, _ = checkpoint(lambda x: (x > 0, x * 2, x * unused), False, x)
    assert mask.dtype == torch.bool
    product.sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert unused.grad is None


def test_results_that_are_inputs_parameters_or_views():
    x, weight, buffer = (
        numbers(2, 3, seed=0).requires_grad_(),
        torch.nn.Parameter(numbers(6, seed=1)),
        numbers(6, seed=2),
    )

    def function(x):
        return x, x.view(-1), weight, buffer, x.flatten() * weight

    def run(recompute):
        same, view, parameter, constant, product = checkpoint(function, False, x) if recompute else function(x)
        return (same.view(-1) * view).sum() + (parameter * constant * product).sum()

    assert_as_without(run, x, weight)
    assert weight.is_leaf
    assert weight.requires_grad
    assert buffer.is_leaf
    assert not buffer.requires_grad


def test_nested_checkpoints_recompute_and_count_themselves():
    x, seen = numbers(3, seed=0).requires_grad_(), []

    def inner(x):
        seen.append(("inner", random.is_checkpointing()))
        return F.dropout(x.sin(), 0.5)

    def outer(x):
        h = checkpoint(inner, False, x)
        seen.append(("outer", random.is_checkpointing()))
        return F.dropout(h * x, 0.5)

    def run(recompute):
        return checkpoint(outer, False, x) if recompute else F.dropout((F.dropout(x.sin(), 0.5)) * x, 0.5)

    assert_as_without(run, x)
    assert seen == [("inner", True), ("outer", True)] * 2 + [("inner", True)]
    assert not random.is_checkpointing()


def test_threads_do_not_count_each_others_checkpoints():
    """The first to begin ends first; a flag of all threads would stay set."""
    inside, ended, found = threading.Barrier(2), threading.Event(), {}

    def work(name):
        x = numbers(3, seed=0).requires_grad_()

        def function(x):
            inside.wait(10)
            if name == "second":
                ended.wait(10)
            return x.sin()

        checkpoint(function, False, x)
        ended.set()
        found[name] = random.is_checkpointing()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"first": False, "second": False}
    assert not random.is_checkpointing()


def test_exceptions_leave_nothing_behind():
    x, broken = numbers(3, seed=0).requires_grad_(), [True]

    def function(x):
        with random.get_cuda_rng_tracker().fork():
            F.dropout(x, 0.5)
            if broken:
                raise KeyError
        return x.sin()

    with seeded():
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        with pytest.raises(KeyError):
            checkpoint(lambda x: checkpoint(function, False, x), False, x)
        assert not random.is_checkpointing()
        broken.clear()
        out = checkpoint(function, False, x)
        broken.append(True)
        with pytest.raises(KeyError), torch.autocast("cpu"):
            out.sum().backward()
        assert not random.is_checkpointing()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.equal(torch.rand(3), expected)


def test_a_second_backward_recomputes_again():
    x, weight = numbers(3, seed=0).requires_grad_(), torch.nn.Parameter(numbers(3, seed=1))

    def function(x):
        return F.dropout(x.sin() * weight, 0.5)

    def run(recompute):
        out = checkpoint(function, False, x) if recompute else function(x)
        out.sum().backward(retain_graph=True)
        return out

    assert_as_without(run, x, weight)


def test_what_recomputation_cannot_do_is_said():
    x = numbers(3, seed=0).requires_grad_()
    with pytest.raises(RuntimeError, match="torch.autograd.grad"):
        torch.autograd.grad(checkpoint(torch.sin, False, x).sum(), x)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        checkpoint(torch.sin, False, x).sum().backward(create_graph=True)

    for argument in (x.detach().clone(), x * 1):
        out = checkpoint(lambda y: y.add_(1) * x, False, argument)
        assert torch.equal(out, (x + 1) * x)
        with pytest.raises(RuntimeError, match="has changed an argument in place"):
            out.sum().backward()

    y = x * 2
    out = checkpoint(torch.sin, False, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()

    results = iter([(x * 1, x * 2), (x * 1,)])
    out = checkpoint(lambda x: next(results), False, x)
    with pytest.raises(RuntimeError, match="returned 2 values in the forward and 1 in its recomputation"):
        sum(out).sum().backward()


def test_the_function_may_be_applied_directly():
    """Megatron's callers pass None and numbers among the arguments, and get one tensor or a tuple back."""
    x = numbers(3, seed=0).requires_grad_()
    out = random.CheckpointFunction.apply(lambda x, mask, n: x.sin() * n, False, x, None, 3)
    out.sum().backward()
    assert torch.equal(x.grad, 3 * x.cos())
    a, b = random.CheckpointFunction.apply(lambda x: (x.sin(), 7), None, x)
    assert b == 7
    x.grad = None
    a.sum().backward()
    assert torch.equal(x.grad, x.cos())


def test_without_a_tracker_none_is_made():
    with no_tracker():
        x = numbers(3, seed=0).requires_grad_()
        checkpoint(lambda x: F.dropout(x, 0.5), False, x).sum().backward()
        assert random._CUDA_RNG_STATE_TRACKER is None


@pytest.mark.parametrize("graph_safe", [False, True], ids=["bytes", "generators"])
def test_streams_of_megatrons_own_tracker_are_drawn_again(graph_safe, monkeypatch):
    """Megatron's layers draw from these streams, and may run inside our checkpoint without the substitution."""
    with megatron_on_cpu(), no_tracker():
        for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
            monkeypatch.setattr(stock, name, None)
        stock.initialize_rng_tracker(use_cudagraphable_rng=graph_safe)
        tracker = stock.get_cuda_rng_tracker()
        tracker.add("model-parallel-rng", 5)

        def dropped(x):
            with tracker.fork():
                return F.dropout(x, 0.5)

        x = torch.ones(64, requires_grad=True)
        y = checkpoint(dropped, False, x)
        between = dropped(x)
        y.sum().backward()
        assert torch.equal(y, x.grad)
        draws = [y, between, dropped(x)]
        tracker.reset()
        tracker.add("model-parallel-rng", 5)
        assert torch.equal(torch.cat(draws), torch.cat([dropped(x) for _ in draws]))


def test_host_numbers_are_drawn_again_beside_an_emulated_device():
    """Hidden states of the emulated device say that they are on the CPU, and what is drawn for them is the host's."""
    seen = []

    def drop(x):
        seen.append(torch.randint(3, x.shape, device=x.device))
        return x * seen[-1]

    x = torch.randn(64, requires_grad=True)
    with megatron_on_cpu(), seeded(3):
        checkpoint(drop, False, x).sum().backward()
        following = torch.randint(3, x.shape, device=x.device)
    first, again = seen
    assert torch.equal(first, again)
    assert not torch.equal(first, following)
    torch.testing.assert_close(x.grad, first.to(x.dtype))
