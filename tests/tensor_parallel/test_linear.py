"""The one linear function: pairs of layouts against torch.nn.functional.linear, what it sends and saves, dtypes."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext.distributed.collectives import start_all_gather
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.numerics.cpu_products import sixteen_bit_products
from megatron_ext.tensor_parallel._layers import linear_autograd as module
from megatron_ext.tensor_parallel._layers.linear_autograd import LinearPlan, parallel_linear
from megatron_ext.tensor_parallel.layers import (
    LinearWithFrozenWeight,
    LinearWithGradAccumulationAndAsyncCommunication,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from tests.operators import Operators
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, assert_as_good, build, numbers, piece, world
from tests.tensor_parallel.test_recompute import saved_tensors

S, B, D, N = 8, 3, 20, 12  # sequence, batch, input features, output features, over all ranks
DIM = {"replicated": None, "sequence": 0, "sharded": -1}  # the dimension of x and y that a layout cuts
LAYOUTS = [("replicated", "sharded"), ("sequence", "sharded"), ("sharded", "replicated"), ("sharded", "sequence")]


def cut(full, layout):
    return full.detach().clone() if DIM[layout] is None else piece(full, DIM[layout])


def short(counts):
    """Counts by the operation's plain name."""
    return {name.rstrip("_"): n for name, n in counts.items()}


@ranks(2)
@pytest.mark.parametrize("wanted", ["x", "w", "b", "xb", "wb"])
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_no_work_for_gradients_that_nobody_wants(layouts, wanted):
    """Fails where the input gradient, or its collective, is made for an input without gradient."""
    source, target = layouts
    tensors = {"x": torch.randn(4, 2, 6), "w": torch.randn(4, 6), "b": torch.randn(4)}
    for name in wanted:
        tensors[name].requires_grad_()
    y = parallel_linear(*tensors.values(), LinearPlan(world(), source, target))
    with count_collectives() as counts, Operators() as operators:
        y.backward(torch.randn_like(y))
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) == (name in wanted)
    expected = {
        ("replicated", "sharded"): {"allreduce": 1} if "x" in wanted else {},
        ("sequence", "sharded"): {"reduce_scatter_base": 1} if "x" in wanted else {},
        ("sharded", "replicated"): {},
        ("sharded", "sequence"): {"allgather_base": 1} if wanted != "b" else {},
    }[layouts]
    if layouts == ("sequence", "sharded") and "w" in wanted:
        expected = {**expected, "allgather_base": 1}
    assert short(counts) == expected
    products = [name for name in operators.names("aten") if name in ("mm", "addmm", "bmm")]
    assert len(products) == sum(name in wanted for name in "xw")


@ranks(2)
@pytest.mark.parametrize("source", ["replicated", "sequence"])
def test_saves_a_slice_of_the_input_only_for_a_trained_weight(source):
    x = torch.randn(4, 2, 6, requires_grad=True)
    for frozen in (False, True):
        w = torch.randn(4, 6, requires_grad=not frozen)
        with saved_tensors() as saved:
            parallel_linear(x, w, None, LinearPlan(world(), source, "sharded"))
        assert [tuple(t.shape) for t in saved] == ([(4, 6)] if frozen else [(4, 2, 6), (4, 6)])
        assert saved[0] is (w if frozen else x)


def test_without_torch_distributed():
    x, w = torch.randn(3, 2, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    for sequence_parallel in (False, True):
        y = linear_with_grad_accumulation_and_async_allreduce(x, w, None, False, False, sequence_parallel)
        torch.testing.assert_close(y, F.linear(x, w))


@ranks(2)
def test_frozen_weight_still_gives_the_bias_its_gradient():
    x, w, b = torch.randn(5, D), torch.randn(N, D), torch.randn(N, requires_grad=True)
    for y in (
        linear_with_frozen_weight(x, w, b, False, False, False, world()),
        linear_with_frozen_weight(x, w.requires_grad_(), b, False, False, False, world()),
        LinearWithFrozenWeight.apply(x, w, b, False, world()),
    ):
        dy = torch.randn_like(y)
        b.grad = None
        y.backward(dy)
        torch.testing.assert_close(b.grad, dy.sum(0))
        assert w.grad is None


@ranks(2)
def test_functions_by_megatrons_argument_order():
    x, w = numbers(4, D, seed=0).requires_grad_(), numbers(N, D, seed=1).requires_grad_()
    y = linear_with_grad_accumulation_and_async_allreduce(x, w, None, False, True, False, None, 0, None, world())
    z = LinearWithGradAccumulationAndAsyncCommunication.apply(x, w, None, False, True, False, None, 0, world())
    (dx,), (dz,) = (torch.autograd.grad(t.square().sum(), x) for t in (y, z))
    torch.testing.assert_close(y, F.linear(x, w))
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(dz, dx)
    torch.testing.assert_close(dx, 2 * (2 * y.detach() @ w))  # both ranks hold the same weight here


@ranks(2, 4)
@pytest.mark.parametrize("source", ["replicated", "sequence"])
def test_non_contiguous_input_and_expanded_gradient(source):
    full, w = numbers(B, S, D, seed=0), numbers(N, D, seed=1)
    x = cut(full.transpose(0, 1), source)
    x = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not x.is_contiguous()
    shard = piece(w, 0).requires_grad_()
    parallel_linear(x, shard, None, LinearPlan(world(), source, "sharded")).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(x.shape), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shard.grad, full.sum((0, 1)).expand(shard.shape), rtol=1e-5, atol=1e-5)


@ranks(2)
def test_two_backwards_and_no_double_backward():
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    y = parallel_linear(x, w, None, LinearPlan(world(), "replicated", "sharded"))
    first = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    for dy in (torch.ones_like(y), torch.ones_like(y).requires_grad_()):
        second = torch.autograd.grad(y, (x, w), dy, create_graph=True)
        torch.testing.assert_close(first, second)
        with pytest.raises(RuntimeError, match="differentiated twice"):
            (y.sum() + second[0].square().sum()).backward()  # a gradient penalty


@ranks(1, 2)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_output_may_be_changed_in_place(layouts, native):
    """Megatron's own cross entropy does so with the logits."""
    x, w, b = (torch.randn(s).bfloat16().requires_grad_() for s in ((4, 3, 6), (4, 6), (4,)))
    for bias in (None, b):
        grads = []
        for change in (lambda y: y * 2, lambda y: y.mul_(2)):
            with sixteen_bit_products(native):
                y = change(parallel_linear(x, w, bias, LinearPlan(world(), *layouts)))
            grads.append(torch.autograd.grad(y.sin().sum(), (x, w)))
        torch.testing.assert_close(*grads)


def test_tokens_of_one_transposed_sequence_are_one_product():
    """Rows are contiguous, by other strides: `torch.nn.functional.linear` would make a product of each."""
    x, w = numbers(1, 64, D, seed=0).transpose(0, 1), numbers(N, D, seed=1)
    assert x.is_contiguous()
    with FlopCounterMode(display=False) as counter:
        y = parallel_linear(x, w, None, LinearPlan())
    assert list(counter.get_flop_counts()["Global"]) == [torch.ops.aten.mm]
    assert torch.equal(y, parallel_linear(x.flatten(0, 1), w, None, LinearPlan()).view(64, 1, N))


@ranks(1, 2, 4)
def test_own_rows_before_the_gathered_ones():
    """The order of matmuls that CUDA tensors take gives what the plain order gives."""
    group = dist.group.WORLD
    full, w, b = numbers(6 * dist.get_world_size(), D, seed=0), numbers(D, N, seed=1), numbers(N, seed=2)
    x = piece(full, 0)
    for bias in (None, b):
        y, gathered = module._own_rows_first(x, w, group, bias, start_all_gather(x, group))
        assert torch.equal(gathered, full)
        torch.testing.assert_close(y, full @ w if bias is None else torch.addmm(b, full, w), rtol=1e-6, atol=1e-5)


# -- bad input ---------------------------------------------------------------------------------------------------------

WRONG = {
    "features": ((4, 5), (4, 6), (4,), {}, "last dimension is 6"),
    "scalar": ((), (4, 6), (4,), {}, r"takes \[..., D\]"),
    "bias": ((4, 6), (4, 6), (3,), {}, r"bias is \(3,\)"),
    "weight dtype": ((4, 6), (4, 6), (4,), {"w": torch.bfloat16}, "weight is torch.bfloat16, input torch.float32"),
    "bias dtype": ((4, 6), (4, 6), (4,), {"b": torch.float64}, "bias is torch.float64"),
    "weight device": ((4, 6), (4, 6), (4,), {"w": torch.device("meta")}, "weight is on meta, input on cpu"),
    "one dimension": ((6,), (4, 6), (4,), {"output": "sequence"}, "first dimension is the sequence"),
    "odd sequence": ((3, 6), (4, 6), (4,), {"output": "sequence"}, "pad it to 4"),
}


@ranks(2)
@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_refused_on_every_rank_before_messages(case):
    x_shape, w_shape, b_shape, changes, message = WRONG[case]
    tensors = {name: torch.zeros(shape) for name, shape in zip("xwb", (x_shape, w_shape, b_shape), strict=True)}
    for name in changes.keys() & tensors.keys():
        tensors[name] = tensors[name].to(changes[name])
    output = changes.get("output", "replicated")
    with count_collectives() as counts, pytest.raises(ValueError, match=message):
        parallel_linear(*tensors.values(), LinearPlan(world(), "sharded", output))
    assert not counts


@ranks(2)
def test_arguments_that_contradict_each_other():
    x, w = torch.zeros(4, 6), torch.zeros(4, 6)
    with pytest.raises(ValueError, match="allreduce_dgrad and sequence_parallel are both True"):
        linear_with_grad_accumulation_and_async_allreduce(x, w, None, False, True, True, tp_group=world())
    with pytest.raises(ValueError, match="grad_output_buffer is .*: a frozen weight has no gradient to defer"):
        linear_with_frozen_weight(x, w, None, False, True, False, world(), [])
    with pytest.raises(ValueError, match="tp_group is None and Megatron's parallel_state is not initialised"):
        linear_with_grad_accumulation_and_async_allreduce(x, w, None, False, True, False)


# -- dtypes ------------------------------------------------------------------------------------------------------------


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
