"""`batch_invariant_mode` of our layers: a token's output has the same bits in any batch, and is as right as torch's."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ext import batch_invariant_mode
from megatron_ext.distributed.collectives import all_gather
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.numerics import batch_invariance, fixed_order
from megatron_ext.tensor_parallel import (
    InferenceLayerNormColumnParallelLinear,
    InferenceRowParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron_ext.tensor_parallel._layers.linear_autograd import LinearPlan, parallel_linear
from tests.batch_invariant_mode import switch, switched_on
from tests.marks import quick_if, slow
from tests.operators import Operators
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, assert_as_good, build, numbers, piece, plain_linear, world
from tests.tensor_parallel.test_linear import DIM, LAYOUTS, cut

S, D, N = 72, 96, 40
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def unsaid():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*batch_invariant_mode is on")
        yield


def whole(y, layout):
    """Return what all ranks have of `y` together."""
    return y if DIM[layout] is None else all_gather(y, world(), dim=y.dim() - 1 if DIM[layout] else 0)


def layer_of(layouts, dtype, config=None):
    """A layer with the weight and bias that all ranks' layers are cut from."""
    column = layouts[1] == "sharded"
    config = config or Config(batch_invariant_mode=True)
    config.params_dtype, config.sequence_parallel = dtype, "sequence" in layouts
    layer = build("column" if column else "row", D, N, config=config, tp_group=world())
    weight, bias = numbers(N, D, seed=1, dtype=dtype), numbers(N, seed=2, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(piece(weight, 0 if column else 1))
        layer.bias.copy_(piece(bias, 0) if column else bias)
    return layer, weight, bias


@ranks(1, 2, 4)
@DTYPES
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_a_tokens_output_does_not_depend_on_other_tokens(layouts, dtype):
    """Fails in fp32 where rows are multiplied as they come, and at four ranks where parts are added as they come."""
    layer, weight, bias = layer_of(layouts, dtype)
    x = numbers(S, 1, D, seed=0, dtype=dtype)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(3))

    def output(tokens):
        return whole(layer(cut(tokens, layouts[0]))[0].detach(), layouts[1])

    together = output(x)
    for some in (slice(0, 4), slice(8, 12), slice(0, 68), order):
        assert torch.equal(output(x[some]), together[some]), some
    assert torch.equal(output(x.expand(S, 3, D))[:, 1:2], together)
    assert_as_good(together, F.linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()))


@ranks(2, 4)
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_gradients_are_those_of_the_whole_layer(layouts):
    layer, weight, bias = layer_of(layouts, torch.float64)
    x, dy = numbers(8, 2, D, seed=0, dtype=torch.float64), numbers(8, 2, N, seed=4, dtype=torch.float64)
    _, dx, whole_dw, _ = plain_linear(torch.float64, x, weight, bias, dy)
    own = cut(x, layouts[0]).requires_grad_()
    with count_collectives() as counts:
        y = layer(own)[0]
    y.backward(cut(dy, layouts[1]))
    torch.testing.assert_close(own.grad, cut(dx, layouts[0]))
    torch.testing.assert_close(layer.weight.grad, piece(whole_dw, 0 if layouts[1] == "sharded" else 1))
    ordered = layouts[0] == "sharded" and dist.get_world_size() > 2
    names = {"all_to_all" if "alltoall" in name else name for name in counts}
    assert any("alltoall" in name for name in counts) == ordered, counts
    assert not ordered or not any("reduce" in name for name in names), counts
    assert ("all-to-all" in layer.plan().communication) == ordered
    assert "batch-invariant" in repr(layer)


@ranks(1)
def test_the_switches_reach_layers_and_functions(monkeypatch):
    """Megatron's and ours; what was on is off afterwards, and is said once."""
    x, w = numbers(S, D, seed=0), numbers(N, D, seed=1)
    given = (w, None, False, False, False)
    fixed = fixed_order.mm(x, w.t())
    assert not torch.equal(fixed, x[:, None].matmul(w.t())[:, 0]) or not torch.equal(fixed[:3], x[:3] @ w.t())
    layer, weight, bias = layer_of(LAYOUTS[0], torch.float32, Config())
    for on in (lambda: switch(True), batch_invariant_mode):
        batch_invariance.say_once.cache_clear()
        with on(), warnings.catch_warnings(record=True, action="always") as said:
            found = [linear_with_grad_accumulation_and_async_allreduce(x[:n], *given) for n in (1, 3, S)]
            assert layer.plan().invariant
            assert torch.equal(layer(x[:3])[0], fixed_order.mm(x[:3], weight.t(), bias))
        assert ["tensor-parallel layers take products and sums of one" in str(one.message) for one in said] == [True]
        assert all(torch.equal(y, fixed[: len(y)]) for y in found)
    assert not layer.plan().invariant


@ranks(2, rules="gloo")  # its tensors are fake
@pytest.mark.parametrize("output_dtype", [torch.float32, *slow(None)])
@pytest.mark.parametrize("layouts", quick_if(LAYOUTS[1].__eq__, LAYOUTS[:3]), ids="-".join)
def test_on_cuda_forward_calls_what_megatrons_mode_replaces(layouts, output_dtype):
    """`aten::mm` and `addmm`, in their plain spelling: `mm.out` and `mm.dtype` are others, which it leaves alone."""
    column = layouts[1] == "sharded"

    def seen(on):
        with switch(on), FakeTensorMode(), Operators() as operators:
            x = torch.empty(8, 1, 16, dtype=torch.bfloat16, device="cuda")
            w = torch.empty(12, 16, dtype=torch.bfloat16, device="cuda")
            bias = torch.empty(12, dtype=torch.bfloat16, device="cuda") if column else None
            parallel_linear(x, w, bias, LinearPlan(world(), *layouts, output_dtype=output_dtype).in_mode())
        return {str(func) for func in operators.seen if "mm" in func._opname}

    assert seen(True) == {"aten.addmm.default" if column else "aten.mm.default"}
    if layouts[0] == "replicated" and output_dtype is not None:
        assert seen(False) == {"aten.mm.dtype"}


@ranks(1, 2, 4)
@DTYPES
def test_layers_for_decoding(dtype):
    config = Config(batch_invariant_mode=True, params_dtype=dtype, sequence_parallel=True)
    common = {"config": config, "init_method": lambda w: None, "tp_group": world(), "bias": False}
    row = InferenceRowParallelLinear(D, N, input_is_parallel=True, skip_bias_add=False, **common).eval()
    column = InferenceLayerNormColumnParallelLinear(N, D, gather_output=False, **common).eval()
    with torch.no_grad():
        row.weight.copy_(piece(numbers(N, D, seed=1, dtype=dtype), 1))
        column.weight.copy_(piece(numbers(D, N, seed=2, dtype=dtype), 0))
    x = numbers(S, 1, D, seed=0, dtype=dtype)

    def output(tokens):
        return all_gather(column(row(piece(tokens, -1))[0])[0], world(), dim=2)

    together = output(x)
    for some in (slice(0, 4), slice(8, 12), slice(0, 68)):
        assert torch.equal(output(x[some]), together[some])


def test_attention_on_cuda_takes_no_flash_kernel():
    """Only in the mode, and only on CUDA."""
    with FakeTensorMode():
        x = torch.empty(2, device="cuda")
    for config, asks in ((None, False), (Config(batch_invariant_mode=True), True)):
        with batch_invariance.attention_kernels(x, config):
            assert torch.backends.cuda.flash_sdp_enabled() != asks
            assert torch.backends.cuda.math_sdp_enabled() != asks
            assert torch.backends.cuda.mem_efficient_sdp_enabled()
        with batch_invariance.attention_kernels(torch.empty(2), config):
            assert torch.backends.cuda.flash_sdp_enabled()


def test_symmetric_memory_is_not_taken():
    plan = LinearPlan(None, "sequence", "sharded", symmetric=True)
    with switched_on():
        assert not plan.in_mode().symmetric
    assert plan.in_mode() is plan
