"""Async tensor parallelism: when it is chosen, who says so where it is not, and the numbers of both ways."""

import contextlib
import importlib
import re
import tempfile
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.meter import one_rank_of
from megatron_ext.distributed import symmetric_matmul
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.symmetric_matmul import why_unavailable
from megatron_ext.tensor_parallel._layers.linear_autograd import LinearPlan, parallel_linear
from tests.operators import Operators
from tests.ranks import ranks
from tests.tensor_parallel.sharded import (
    Config,
    assert_as_good,
    assert_pieces_as_good,
    build,
    numbers,
    piece,
    symmetric_memory,
)

S, B, D, N = 8, 3, 16, 24
GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
OPERATORS = {"column": [GATHER, SCATTER], "row": [SCATTER, GATHER]}  # forward, backward


def layer_of(kind, config, sizes=(D, N), **options):
    def init(weight):
        weight.copy_(numbers(*weight.shape, seed=7))

    return build(kind, *sizes, config=config, init_method=init, tp_group=dist.group.WORLD, **options)


@ranks(2, 4)
@pytest.mark.parametrize("weight", ["trained", "frozen", "into main_grad"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_values_gradients_and_traffic_of_the_plain_way(kind, weight):
    x, dy = numbers(S, B, D, seed=1), numbers(S, B, N, seed=2)
    x, dy = (piece(x, 0), piece(dy, -1)) if kind == "column" else (piece(x, -1), piece(dy, 0))
    results, sent = [], []
    for overlap in (False, True):
        fused = weight == "into main_grad"
        config = Config(sequence_parallel=True, gradient_accumulation_fusion=fused, tp_comm_overlap=overlap)
        with symmetric_memory(), Operators() as asked:
            layer = layer_of(kind, config)
            layer.weight.requires_grad_(weight != "frozen")
            layer.weight.main_grad = torch.ones_like(layer.weight)
            own = x.clone().requires_grad_()
            with count_collectives() as counts:
                y, _ = layer(own)
                y.backward(dy)
        results.append((y.detach(), own.grad, layer.weight.grad, layer.weight.main_grad, layer.bias.grad))
        sent.append(counts.total() + len(asked.names("symm_mem")))  # each operator stands for one
        assert asked.names("symm_mem") == (OPERATORS[kind] if overlap else [])
        assert (layer.weight.main_grad == 1).all() != fused
    assert layer.symmetric
    assert "path=symmetric memory" in repr(layer)
    assert sent[0] == sent[1]
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("layouts", [("sequence", "sharded"), ("sharded", "sequence")], ids="-".join)
def test_pytorchs_operators_take_what_they_are_given(layouts):
    from torch.distributed import _symmetric_memory  # noqa: F401

    with one_rank_of(4) as group, Operators() as asked:
        x = torch.empty(S, B, D, dtype=torch.bfloat16, requires_grad=True)
        w = torch.empty(N, D, dtype=torch.bfloat16, requires_grad=True)
        y = parallel_linear(x, w, None, LinearPlan(group, *layouts, symmetric=True))
        y.sum().backward()
    assert y.shape == ((4 * S if layouts[0] == "sequence" else S // 4), B, N)
    assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)
    assert asked.names("symm_mem") == OPERATORS["column" if layouts[0] == "sequence" else "row"]


@ranks(2)
@pytest.mark.parametrize("kind", ["column", "row"])
def test_says_that_it_cannot(kind):
    """Layers without a GPU or sequence parallelism take plain collectives; a warning and `repr` give the reason."""
    symmetric_matmul._found.clear()
    for sequence_parallel, reason in ((True, "a rank has no GPU"), (False, "sequence_parallel is off")):
        with pytest.warns(UserWarning, match=rf"tp_comm_overlap is True, but .* \({reason}\).*plain collectives"):
            layer = layer_of(kind, Config(sequence_parallel=sequence_parallel, tp_comm_overlap=True))
        assert not layer.symmetric
        assert f"path=collectives, not symmetric memory: {reason}" in repr(layer)
    with warnings.catch_warnings(action="error"):
        assert repr(layer_of(kind, Config(sequence_parallel=True))).endswith("path=collectives)")
        layer_of(kind, Config(sequence_parallel=True, tp_comm_overlap=True), is_expert=True)  # sends nothing


@ranks(1)
def test_one_rank_asks_for_nothing():
    with warnings.catch_warnings(action="error"), count_collectives() as counts:
        assert "communication=none" in repr(layer_of("column", Config(sequence_parallel=True, tp_comm_overlap=True)))
    assert not counts


@ranks(2)
def test_every_rank_decides_alike():
    """Ranks learn of what one of them lacks and of several machines in one exchange, and keep the answer.

    In an actor of Ray each process has its GPU as cuda:0, which torch refused at the first forward.
    """
    group, rank = dist.group.WORLD, dist.get_rank()
    for machine, index, gpu, lacking, expected in (
        ("here", rank, rank, "a rank has no arms", "a rank has no arms"),
        (rank, rank, rank, None, "the ranks are in several machines"),
        ("here", 0, rank, None, "ranks have different GPUs as cuda:0.*RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1"),
        ("here", 0, 0, None, "two ranks share a GPU"),
        ("here", rank, rank, None, None),
    ):
        symmetric_matmul._found.clear()
        with pytest.MonkeyPatch.context() as monkeypatch:
            own = symmetric_matmul._Rank(str(machine), index, str(gpu), lacking if rank == 1 else None)
            monkeypatch.setattr(symmetric_matmul, "_own_rank", lambda group, own=own: own)
            reason = why_unavailable(group)
            assert reason is None if expected is None else re.match(expected, reason), reason
            if expected is not None and "cuda:0" in expected:
                symmetric_matmul._found.clear()
                monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
                assert why_unavailable(group) is None
                monkeypatch.undo()
                continue
            with count_collectives() as counts:
                assert why_unavailable(group) == reason
            assert not counts
    symmetric_matmul._found.clear()


@pytest.mark.parametrize("torch_has", ["a function to tell", "a deprecated one", "none"])
def test_torch_is_told_of_a_group_where_it_must_be(torch_has, monkeypatch):
    """Torch warns from 2.13 on when it is told of a group; where the function is gone, nothing is lacking."""
    memory, told = importlib.import_module("torch.distributed._symmetric_memory"), []

    def tell(name):
        told.append(name)

    if torch_has == "a deprecated one":
        tell.__deprecated__ = "there is no need to call it"
    monkeypatch.setattr(memory, "enable_symm_mem_for_group", tell)
    if torch_has == "none":
        monkeypatch.delattr(memory, "enable_symm_mem_for_group")
    for name, answer in (("is_available", True), ("current_device", 0), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    assert symmetric_matmul._lacking(SimpleNamespace(group_name="0")) is None
    assert told == (["0"] if torch_has == "a function to tell" else [])


@pytest.mark.gpu
@pytest.mark.rehearsed
def test_the_real_operators():
    """Take as many GPUs as there are, at most 4. On one GPU the layers don't choose symmetric memory: they are told to.
    A rehearsal takes two CPU ranks, with the kernels that PyTorch shows the compiler."""
    size = min(4, torch.cuda.device_count()) or 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_real_operators, args=(size, f"file://{folder}/store"), nprocs=size)


def _real_operators(rank, size, store):
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(rank)
    backend = {"backend": "nccl", "device_id": device} if on_gpu else {"backend": "gloo"}
    dist.init_process_group(init_method=store, rank=rank, world_size=size, **backend)
    with contextlib.nullcontext() if on_gpu else symmetric_memory():
        _operators_by_themselves(dist.group.WORLD, device)
        for layouts, operators in (
            (("sequence", "sharded"), OPERATORS["column"]),
            (("sharded", "sequence"), OPERATORS["row"]),
        ):
            _operators_of_a_layer(dist.group.WORLD, device, layouts, operators)
        for kind in ("column", "row"):
            layer = layer_of(kind, Config(sequence_parallel=True, tp_comm_overlap=True), sizes=(64, 128))
            assert layer.symmetric == (size > 1), repr(layer)
    dist.barrier()
    dist.destroy_process_group()


def _operators_by_themselves(group, device):
    x, w = (numbers(*shape, seed=i, dtype=torch.bfloat16).to(device) for i, shape in enumerate([(1024, 64), (64, 128)]))
    own, ranks = piece(x, 0), group.size()
    y, gathered = symmetric_matmul.all_gather_matmul(own, w, group)
    assert_as_good(y, x @ w, x.double() @ w.double(), factor=1.1)
    assert gathered.equal(x)
    scattered = symmetric_matmul.matmul_reduce_scatter((1 + group.rank()) * x, w, group)
    times = ranks * (ranks + 1) // 2
    plain = sum(((1 + rank) * own) @ w for rank in range(ranks))
    assert_as_good(scattered, plain, times * (own.double() @ w.double()), factor=1.5)


def _operators_of_a_layer(group, device, layouts, operators):
    """Output and gradients beside those of one process in fp64, and how far its bf16 is from them."""
    shapes = [(512, 2, 64), (128, 64), (512, 2, 128)]
    x, w, dy = (numbers(*shape, seed=i, dtype=torch.bfloat16).to(device) for i, shape in enumerate(shapes))
    cut_x, cut_w, cut_dy = (0, 0, -1) if layouts[0] == "sequence" else (-1, 1, 0)
    own_x, own_w = (piece(full, dim).requires_grad_() for full, dim in ((x, cut_x), (w, cut_w)))
    with Operators() as asked:
        y = parallel_linear(own_x, own_w, None, LinearPlan(group, *layouts, symmetric=True))
        y.backward(piece(dy, cut_dy))
    assert asked.names("symm_mem") == operators
    plain, true = (
        (y, *torch.autograd.grad(y, leaves, dy.to(y))) for leaves, y in map(_whole, (x, x.double()), (w, w.double()))
    )
    assert_pieces_as_good((y, own_x.grad, own_w.grad), (cut_dy, cut_x, cut_w), plain, true, factor=1.5)


def _whole(x, w):
    leaves = [leaf.clone().requires_grad_() for leaf in (x, w)]
    return leaves, leaves[0] @ leaves[1].t()
