"""Memory kept for backward: a fraction, bytes, by default a bounded number of columns, or by free memory."""

import inspect
import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_ext import VocabShard, linear_cross_entropy, linear_log_probs
from megatron_ext.head import Gather, LmHead, LogProbs
from megatron_ext.head.call import chunk_sizes
from megatron_ext.head.call.chunk_sizes import cached_columns, keeps_all
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.losses import DPOLoss
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from tests.head.problems import Problem
from tests.ranks import ranks


def options(**chosen):
    return ResolvedHead(group=None, vocab=VocabShard(0, 1000, 1000), **chosen)


@pytest.fixture
def undecided():
    """ "auto" has decided nothing yet, nor will have afterwards."""
    chunk_sizes._columns_that_fit.cache_clear()
    yield
    chunk_sizes._columns_that_fit.cache_clear()


def free_memory(monkeypatch, sizes):
    """Free bytes of the machine, one number for each time that anybody asks."""
    left = iter(sizes)
    monkeypatch.setattr(os, "sysconf", lambda name: next(left) if name == "SC_AVPHYS_PAGES" else 1)


def kept_bytes(call):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
        call()
    return sizes


def test_rows_of_other_read_outs_are_not_kept():
    """Log-probabilities keep three fp64 numbers a token, also where columns are gathered beside them."""
    hidden, weight, labels = torch.randn(30, 8, requires_grad=True), torch.randn(64, 8), torch.randint(0, 64, (30,))
    storages = {}

    def pack(x):
        if x.dtype == torch.float64:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        LmHead(weight).read(hidden, LogProbs(labels), Gather(torch.zeros(30, 9, dtype=torch.int64)))
    assert sum(storages.values()) == 30 * 3 * 8


@pytest.mark.parametrize("cache, kept", [(0.25, 20 * 10 * 8), (20 * 10 * 8 + 7, 20 * 10 * 8), (10**9, 20 * 41 * 8)])
def test_a_fraction_or_a_number_of_bytes_bounds_what_is_kept(cache, kept):
    """Autograd holds nothing else of vocabulary size but the weight."""
    problem = Problem()
    hidden, weight, _ = problem.mine(None)
    sizes = kept_bytes(lambda: linear_cross_entropy(hidden, weight, problem.labels, cache=cache))
    assert kept in sizes
    assert sum(sizes) < kept + hidden.nbytes + weight.nbytes + 20 * 100


@pytest.mark.parametrize(
    "dtype, width, tokens, eighths",
    [
        (torch.bfloat16, 4096, 8192, 8),  # Llama 3 8B
        (torch.bfloat16, 4096, 12288, 8),
        (torch.bfloat16, 4096, 12289, 7),
        (torch.bfloat16, 8192, 131072, 1),
        (torch.float16, 512, 4096, 3),
        (torch.float16, 512, 1 << 20, 0),
        (torch.float32, 512, 4096, 2),
        (torch.float64, 512, 768, 8),
        (torch.float64, 512, 769, 7),
        (torch.bfloat16, 8, 0, 8),
    ],
    ids=str,
)
def test_default_cache_is_bounded_by_weight_and_fp32_gradient(dtype, width, tokens, eighths):
    """The default keeps as many eighths of the columns as the bound allows, whatever memory is free."""
    like, columns = torch.empty(0, width, dtype=dtype), 1003
    found = cached_columns(options(), tokens, columns, like)
    assert found == columns * eighths // 8
    allowed = columns * width * (like.element_size() + 4)
    assert found * tokens * like.element_size() <= allowed
    assert eighths == 8 or (eighths + 1) * columns * tokens * like.element_size() > 8 * allowed
    assert keeps_all(options(), tokens, like) == (eighths == 8)


def test_the_default_is_the_same_everywhere():
    functions = (linear_cross_entropy, linear_log_probs, ResolvedHead, HeadSettings)
    assert {inspect.signature(function).parameters["cache"].default for function in functions} == {"bounded"}
    assert DPOLoss()._head(torch.zeros(3, 2)).cache == "bounded"


def test_the_default_asks_nobody_for_free_memory(monkeypatch):
    problem = Problem((18, 5))
    hidden, weight, _ = problem.mine(None)

    def call():
        return linear_cross_entropy(hidden, weight, problem.labels)

    before = kept_bytes(call)
    free_memory(monkeypatch, [])
    assert kept_bytes(call) == before
    assert 90 * (41 // 8) * 8 in before  # fp64, D 8, T 90: 12 / 8 * 8 / 90, an eighth


@pytest.mark.parametrize("cache", ["bounded", "auto"])
def test_recomputed_while_memory_fills_up(cache, monkeypatch, undecided):
    """`torch.utils.checkpoint` compares the shapes that its two forwards save."""
    problem = Problem((20, 5), dtype=torch.float32)
    hidden, weight, _ = problem.mine(None)

    def call(*leaves):
        chosen = {} if cache == "bounded" else {"cache": cache}
        return linear_cross_entropy(*leaves, problem.labels, **chosen)

    free_memory(monkeypatch, [2 * 30 * 100 * 4, 2 * 30 * 100 * 4] + 10 * [2 * 10 * 100 * 4])
    plain = call(hidden, weight)
    want = torch.autograd.grad(plain, (hidden, weight), problem.grad)
    chunk_sizes._columns_that_fit.cache_clear()
    found = checkpoint(call, hidden, weight, use_reentrant=False)
    got = torch.autograd.grad(found, (hidden, weight), problem.grad)
    torch.testing.assert_close([found, *got], [plain, *want])


def test_auto_decides_once_for_each_shape(monkeypatch, undecided):
    """Half of the memory that is free, less what backward will need besides, at the first call."""
    auto, like = options(cache="auto"), torch.empty(1)
    free_memory(monkeypatch, [1 << 40, 10 * 4096, 10 * 4096])
    assert cached_columns(auto, 20, 1000, like) == 1000
    assert cached_columns(auto, 10, 1000, like) == 10 * 4096 // 2 // 40
    assert cached_columns(auto, 10, 1000, like, later=9 * 4096) == 4096 // 40
    assert cached_columns(auto, 20, 1000, like) == 1000  # nobody asks again
    assert cached_columns(auto, 10, 1000, like) == 10 * 4096 // 2 // 40


def test_auto_takes_no_more_than_what_is_free_on_cuda(monkeypatch, undecided):
    """Free memory of the device and whole free blocks of the allocator; what backward needs besides stays free."""
    auto, like = options(cache="auto"), torch.empty(1, dtype=torch.bfloat16)
    stats = {"reserved_bytes": 9000, "active_bytes": 4000, "inactive_split_bytes": 1000}
    nested = {name: {"all": {"current": number}} for name, number in stats.items()}
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6000, 100000))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: nested)
    assert cached_columns(auto, 10, 1000, like) == (6000 + 4000) // 2 // 20
    assert cached_columns(auto, 10, 1000, like, later=7000) == 3000 // 20
    assert cached_columns(auto, 10, 1000, like, later=20000) == 0
    assert cached_columns(auto, 10, 100, like) == 100


@ranks(2)
@pytest.mark.parametrize("cache", ["bounded", 1024])
def test_ranks_gather_alike_whatever_each_keeps(cache):
    """One rank keeps both of its columns and needs no hidden states, for which the other one waits."""
    group, problem = dist.group.WORLD, Problem(cuts=[39])
    hidden, weight, _ = problem.mine(group, "sequence", (True, False))
    (want,), grads = problem.truth("loss")
    loss = linear_cross_entropy(
        hidden, weight, problem.labels, group, "sequence", vocab=problem.shard(group), cache=cache
    )
    torch.testing.assert_close(loss, want)
    (dx,) = torch.autograd.grad(loss, hidden, problem.grad)
    torch.testing.assert_close(dx, problem.pieces(grads, group, "sequence")[0])


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["bounded", "auto"])
def test_compiled_at_several_lengths(cache):
    """Each length compiles to one graph; "bounded" keeps 6 eighths of the columns for 15 tokens, and 2 for 40."""
    torch._dynamo.reset()

    def call(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels, cache=cache)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for tokens in (15, 40):
        problem, results = Problem((tokens,)), []
        hidden, weight, _ = problem.mine(None)
        for function in (call, compiled):
            loss = function(hidden, weight, problem.labels)
            results.append([loss.detach(), *torch.autograd.grad(loss, (hidden, weight), problem.grad.double())])
        torch.testing.assert_close(*results)
