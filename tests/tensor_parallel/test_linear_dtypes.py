"""Dtypes of the one linear function: autocast, float64, and results wider than their operands."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ext.tensor_parallel._layers.linear_autograd import LinearPlan, parallel_linear
from megatron_ext.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, assert_as_good, build, numbers, piece, world
from tests.tensor_parallel.test_linear import D, N, S, cut


@ranks(1, 2)
@pytest.mark.parametrize("source", ["replicated", "sequence"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
def test_autocast_as_torchs_linear(source, dtypes):
    full, w, b = numbers(S, D, seed=0, dtype=dtypes[0]), numbers(N, D, seed=1), numbers(N, seed=2)
    group, target = world(), "sharded"
    results = []
    for ours in (False, True):
        x = (cut(full, source) if ours else full.clone()).requires_grad_()
        shard, bias = (piece(t, 0).requires_grad_() for t in (w, b))
        with torch.autocast("cpu", torch.bfloat16):
            y = parallel_linear(x, shard, bias, LinearPlan(group, source, target)) if ours else F.linear(x, shard, bias)
            # Backward inside the region too: its own matmuls must keep to the dtypes of the forward pass.
            (y.float() ** 2).sum().backward()
        results.append([y.detach(), shard.grad, bias.grad, x.grad])
    like, actual = results
    dx = like[3].clone()
    dist.all_reduce(dx)
    like[3] = cut(dx, source)
    for a, e in zip(actual, like, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=2**-7, atol=2**-7 * e.abs().max().item())


@ranks(1)
def test_backward_under_autocast_keeps_full_precision():
    x, w = torch.randn(5, D, requires_grad=True), torch.randn(N, D, requires_grad=True)
    y = parallel_linear(x, w, None, LinearPlan())
    dy = torch.randn_like(y)
    with torch.autocast("cpu", torch.bfloat16):
        y.backward(dy)
    torch.testing.assert_close((x.grad, w.grad), (dy @ w.detach(), dy.t() @ x.detach()))


@ranks(1)
def test_float64_is_left_alone_by_autocast():
    x, w = torch.randn(5, D, dtype=torch.float64), torch.randn(N, D, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        y = parallel_linear(x, w, None, LinearPlan())
        assert y.dtype == F.linear(x, w).dtype == torch.float64
    torch.testing.assert_close(y, x @ w.t())


@ranks(1, 2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_output_dtype_keeps_what_the_matmul_accumulated(sequence_parallel):
    """16-bit operands, fp32 result: at the error of an fp32 matmul of the same numbers, without Transformer Engine."""
    full, w, b = (numbers(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate([(S, 512), (N, 512), (N,)]))
    source = "sequence" if sequence_parallel else "replicated"
    for function in (linear_with_grad_accumulation_and_async_allreduce, linear_with_frozen_weight):
        x, shard, bias = cut(full, source).requires_grad_(), piece(w, 0).requires_grad_(), piece(b, 0).requires_grad_()
        flags = False, not sequence_parallel, sequence_parallel
        y = function(x, shard, bias, *flags, tp_group=world(), output_dtype=torch.float32)
        wide = F.linear(full.float(), piece(w, 0).float(), piece(b, 0).float())
        assert_as_good(y.detach(), wide, F.linear(full.double(), piece(w, 0).double(), piece(b, 0).double()))
        dy = numbers(S, N, seed=9)
        y.backward(piece(dy, -1))
        assert x.grad.dtype == torch.bfloat16
        dx = [
            (dy.to(d).to(torch.bfloat16).to(d) @ w.to(d)).to(e)
            for d, e in ((torch.float32, torch.bfloat16), (torch.float64,) * 2)
        ]
        assert_as_good(x.grad, cut(dx[0], source), cut(dx[1], source))


@ranks(1, 2)
@pytest.mark.parametrize("gather", [False, True])
def test_output_dtype_of_a_column_parallel_layer(gather):
    config = Config(params_dtype=torch.bfloat16)
    layer = build("column", 512, N, config=config, gather_output=gather, output_dtype=torch.float32, tp_group=world())
    x, w = numbers(S, 512, seed=0, dtype=torch.bfloat16), numbers(N, 512, seed=1, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(piece(w, 0))
    y = layer(x)[0]
    wide, true = (F.linear(x.to(kind), w.to(kind)) for kind in (torch.float32, torch.float64))
    assert_as_good(y.detach(), *((wide, true) if gather else (piece(wide, -1), piece(true, -1))))
    dy = numbers(S, N, seed=2)
    y.backward(dy if gather else piece(dy, -1))
    assert layer.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(layer.weight.grad.float(), piece(dy.t() @ x.float(), 0), rtol=2e-2, atol=5e-2)
