"""ColumnParallelLinear and RowParallelLinear against torch.nn.functional.linear, with every option."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel import layers as stock
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel import layers as ours
from tests.gpt import grouped, model_parallel, tiny_config
from tests.marks import quick_if
from tests.ranks import ranks
from tests.tensor_parallel.sharded import (
    CLASSES,
    Config,
    assert_pieces_as_good,
    build,
    numbers,
    piece,
    plain_linear,
    world,
)
from tests.tensor_parallel.test_linear import DIM, LAYOUTS, cut

S, B, D, N = 8, 3, 16, 24


def init(weight):
    """Weights that depend on the shape of the full weight alone."""
    weight.copy_(numbers(*weight.shape, seed=7))


def column(**options):
    return build("column", D, N, init_method=init, **{"tp_group": world(), **options})


def row(**options):
    return build("row", D, N, init_method=init, **{"tp_group": world(), **options})


def set_bias(layer, dim=None):
    full = numbers(N, seed=8, dtype=layer.bias.dtype)
    with torch.no_grad():
        layer.bias.copy_(full if dim is None else piece(full, dim))
    return full


# -- values ------------------------------------------------------------------------------------------------------------


def check(layer, layouts, *, lead=(S, B), dtype=torch.float32, frozen=False, **asked):
    """Output and gradients beside torch's linear of the whole, without a warning; the collectives of the forward."""
    source, target = layouts
    dim = layer.weight.partition_dim
    b = set_bias(layer, None if dim else 0)
    layer.weight.requires_grad_(not frozen)
    w, full, dy = (numbers(*s, seed=i, dtype=dtype) for s, i in (((N, D), 7), ((*lead, D), 1), ((*lead, N), 2)))
    x = cut(full, source).requires_grad_()
    with warnings.catch_warnings(action="error"):
        with count_collectives() as counts:
            y, bias = layer(x, **asked)
        y.backward(cut(dy, target))
    assert bias is None
    assert (layer.weight.grad is None) == frozen
    if target == "sequence":
        dist.all_reduce(layer.bias.grad)  # as Megatron does for parameters with that mark
    results = (y.detach(), x.grad, layer.weight.grad, layer.bias.grad)
    cuts = (DIM[target], DIM[source], dim, None if dim else 0)
    plain, truth = (plain_linear(kind, full, w, b, dy) for kind in (dtype, torch.float64))
    there = (0, 1, 3) if frozen else (0, 1, 2, 3)
    assert_pieces_as_good(*([each[i] for i in there] for each in (results, cuts, plain, truth)))
    return sum(counts.values())


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("built, asked", [(False, None), (True, None), (True, False), (False, True)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column(sequence_parallel, built, asked, dtype):
    gather = built if asked is None else asked
    layer = column(gather_output=built, config=Config(sequence_parallel=sequence_parallel, params_dtype=dtype))
    layouts = "sequence" if sequence_parallel else "replicated", "replicated" if gather else "sharded"
    sent = check(layer, layouts, dtype=dtype, runtime_gather_output=asked)
    assert sent == (0 if dist.get_world_size() == 1 else sequence_parallel + gather)


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source, target", [("sharded", "replicated"), ("replicated",) * 2, ("sharded", "sequence")])
def test_row(source, target, dtype):
    config = Config(sequence_parallel=target == "sequence", params_dtype=dtype)
    layer = row(input_is_parallel=source == "sharded", config=config)
    check(layer, (source, target), dtype=dtype)
    assert layer.bias.sequence_parallel == (target == "sequence")


LEADS = [(), (4,), (4, 2, 3), (2, 1, 2, 3), (0,)]


@ranks(1, 2)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("lead", quick_if(lambda lead: len(lead) in (0, 4) or 0 in lead, LEADS), ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_any_leading_dimensions(layouts, lead, frozen):
    if lead or "sequence" not in layouts:
        layer = column if layouts[1] == "sharded" else row
        check(layer(config=Config(sequence_parallel="sequence" in layouts)), layouts, lead=lead, frozen=frozen)


@ranks(2)
@pytest.mark.parametrize("layer", [column, row], ids=["column", "row"])
def test_bias_is_handed_out_where_the_caller_adds_it(layer):
    with_bias, without = layer(skip_bias_add=True), layer(bias=False)
    x = torch.randn(S, D if layer is column else D // 2)
    set_bias(with_bias, 0 if layer is column else None)
    (y, bias), (like, none) = with_bias(x), without(x)
    assert bias is with_bias.bias
    assert none is None
    torch.testing.assert_close(y, like)


@ranks(1, 2)
def test_weight_of_the_caller():
    layer = column(skip_weight_param_allocation=True, bias=False)
    assert layer.weight is None
    assert list(layer.parameters()) == []
    x, w = torch.randn(S, D), piece(numbers(N, D, seed=3), 0).requires_grad_()
    layer(x, weight=w)[0].sum().backward()
    torch.testing.assert_close(w.grad, x.sum(0).expand(w.shape))
    with pytest.raises(ValueError, match="weight is None, and the layer has none of its own"):
        layer(x)


@ranks(2)
def test_disabled_gradient_reduction():
    layer = column(disable_grad_reduce=True, bias=False)
    x = torch.randn(S, D, requires_grad=True)
    with count_collectives() as counts:
        layer(x)[0].sum().backward()
    assert not counts
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(x.shape))  # this rank's part alone


@ranks(1, 2)
def test_input_gradient_is_summed_after_sequence_parallel():
    """Megatron's set_model_to_sequence_parallel(model, False) sets this attribute of its layers alone."""
    layer = column(config=Config(sequence_parallel=True), bias=False)
    layer.sequence_parallel = False
    x = torch.randn(S, D, requires_grad=True)
    layer(x)[0].sum().backward()
    torch.testing.assert_close(x.grad, numbers(N, D, seed=7).sum(0).expand(x.shape))


@ranks(1)
def test_sequence_parallel_alone_is_nothing():
    config = Config(sequence_parallel=True)
    with warnings.catch_warnings(action="error"):
        layers = column(config=config), row(config=config)
        outputs = [layer(torch.randn(S, D, requires_grad=True))[0] for layer in layers]
        sum(outputs).sum().backward()
    assert [y.shape for y in outputs] == [(S, N), (S, N)]
    assert not layers[0].sequence_parallel


@pytest.mark.parametrize("kind", CLASSES)
def test_in_a_process_without_process_group(kind):
    layer = build(kind, 4, 6, config=SimpleNamespace())
    x = torch.arange(3) if kind == "embedding" else torch.randn(3, 4)
    y, expected = layer(x), F.embedding(x, layer.weight) if kind == "embedding" else F.linear(x, layer.weight)
    torch.testing.assert_close(y if kind == "embedding" else y[0], expected)


@ranks(4)
def test_group_of_some_of_the_ranks():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, place = divmod(dist.get_rank(), 2)
    layer = column(tp_group=pairs[pair], config=Config(sequence_parallel=True), bias=False)
    full = numbers(S, D, seed=pair)
    y, _ = layer(full.chunk(2)[place])
    torch.testing.assert_close(y, F.linear(full, numbers(N, D, seed=7).chunk(2)[place]))
    with pytest.raises(ValueError, match="tp_group does not hold this rank"):
        column(tp_group=pairs[1 - pair])


# -- bad input ---------------------------------------------------------------------------------------------------------


@ranks(4)
def test_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="output_size is 10: it must divide by the 4 .*; pad it to 12"):
        build("column", D, 10, tp_group=world())
    with pytest.raises(ValueError, match="input_size is 18: .*pad it to 20"):
        build("row", 18, N, tp_group=world())


@ranks(2)
def test_other_refusals():
    with pytest.raises(ValueError, match="input_is_parallel is False while config.sequence_parallel is True"):
        row(input_is_parallel=False, config=Config(sequence_parallel=True))
    with pytest.raises(ValueError, match="parallel_state is not initialised"):
        column(tp_group=None)
    with pytest.raises(ValueError, match=r"weight is \(24, 16\): it must be \(12, 16\).*pass the shard"):
        column()(torch.randn(S, D), weight=torch.randn(N, D))
    with count_collectives() as counts, pytest.raises(ValueError, match="last dimension is 8"):
        row()(torch.randn(S, D))
    assert not counts


# -- what is sent ------------------------------------------------------------------------------------------------------

FLOAT = 4  # bytes


class Sent(TorchDispatchMode):
    """Collectives, and the bytes of the tensors that this rank gives to them."""

    def __init__(self):
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            # All-reduce works in place; the others take the output first and the input after it.
            given = args[0] if func._opname.strip("_") == "allreduce" else args[1]
            self.calls += 1
            self.bytes += sum(t.nbytes for t in tree_leaves(given) if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def traffic(layer, x):
    """((collectives, bytes) forward, the same backward)."""
    with Sent() as forward:
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
    with Sent() as backward:
        y.backward(torch.ones_like(y))
    return (forward.calls, forward.bytes), (backward.calls, backward.bytes)


# Bytes that one rank gives: an all-gather's are its slice, a reduce-scatter's and an all-reduce's the whole tensor.
X, Y = S * B * D * FLOAT, S * B * N * FLOAT
EXPECTED = {
    ("column", False): ((0, 0), (1, X)),
    ("column", True): ((1, X // 2), (2, X // 2 + X)),
    ("row", False): ((1, Y), (0, 0)),
    ("row", True): ((1, Y), (1, Y // 2)),
    ("embedding", False): ((1, X), (0, 0)),
    ("embedding", True): ((1, X), (1, X // 2)),
}
CASES = [
    (kind, sequence_parallel, wanted)
    for kind, sequence_parallel in EXPECTED
    for wanted in ("all gradients", "no input gradient", "frozen weight")
    if kind != "embedding" or wanted == "all gradients"
]


@pytest.mark.slow
@ranks(2, rules="gloo")  # its operators are counted
@pytest.mark.parametrize("kind,sequence_parallel,wanted", CASES)
def test_collectives_and_bytes(kind, sequence_parallel, wanted):
    with model_parallel(tp=2):
        results = []
        scattered = {"reduce_scatter_embeddings": sequence_parallel} if kind == "embedding" else {}
        sizes = (N, D) if kind == "embedding" else (D, N)
        config = tiny_config(sequence_parallel=sequence_parallel)
        for package in (ours, stock):
            layer = build(kind, *sizes, package=package, config=config, **scattered)
            layer.weight.requires_grad_(wanted != "frozen weight")
            if kind == "embedding":
                x = torch.randint(N, (B, S))
            else:
                shape = (S // 2 if sequence_parallel and kind == "column" else S, B, D // 2 if kind == "row" else D)
                x = torch.randn(shape, requires_grad=wanted != "no input gradient")
            results.append(traffic(layer, x))
    forward, backward = EXPECTED[kind, sequence_parallel]
    if kind == "column" and wanted == "no input gradient":
        backward = (1, X // 2) if sequence_parallel else (0, 0)
    if kind == "column" and wanted == "frozen weight" and sequence_parallel:
        backward = (1, X)
    mine, theirs = results
    assert mine == (forward, backward)
    for a, b in zip(mine, theirs, strict=True):
        assert a[0] <= b[0]
        assert a[1] <= b[1]


# -- experts: whole or cut, and what they leave to the token dispatcher ------------------------------------------------


def expert_layers(config, **options):
    shared = {"config": config, "init_method": init, "is_expert": True, "bias": False}
    return build("column", D, N, **shared), build("row", N, D, **{**shared, "skip_bias_add": True, **options})


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sharded_experts_leave_communication_to_the_dispatcher(sequence_parallel):
    with model_parallel(tp=2, expert_tensor_parallel_size=2):
        config = Config(sequence_parallel=sequence_parallel)
        up, down = expert_layers(config, bias=True, skip_bias_add=False)
        with torch.no_grad():
            down.bias.copy_(numbers(D, seed=5))
        x, dy = numbers(S, D, seed=1).requires_grad_(), numbers(S, D, seed=2)
        with count_collectives() as counts:
            y, _ = down(torch.tanh(up(x)[0]))
            y.backward(dy)
        assert not counts
        dist.all_reduce(y := y.detach())
        dist.all_reduce(x.grad)
    whole_x = x.detach().clone().requires_grad_()
    w_up, w_down, bias = numbers(N, D, seed=7), numbers(D, N, seed=7), numbers(D, seed=5).requires_grad_()
    whole = F.linear(torch.tanh(F.linear(whole_x, w_up)), w_down, bias)
    whole.backward(dy)
    torch.testing.assert_close(y, whole.detach(), rtol=1e-5, atol=1e-4)  # the bias once, not once a rank
    torch.testing.assert_close(x.grad, whole_x.grad, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(down.bias.grad, bias.grad)
    assert not down.bias.sequence_parallel  # else Megatron would add up what is whole on every rank
    assert up.explicit_expert_comm
    assert up.weight.allreduce is True  # no expert parallelism


@grouped(2, tp=2, ep=2, expert_tensor_parallel_size=1)
def test_experts_of_expert_parallelism():
    up, down = expert_layers(Config(expert_model_parallel_size=2), bias=True)
    assert up.weight.shape == (N, D)
    assert [p.allreduce for layer in (up, down) for p in layer.parameters()] == [False] * 3
    dense = build("column", D, N, config=Config(expert_model_parallel_size=2))
    assert dense.weight.shape == (N // 2, D)
    assert dense.weight.allreduce is True
    assert not dense.explicit_expert_comm
    x = torch.randn(S, D, requires_grad=True)
    with count_collectives() as counts:
        y, bias = down(up(x)[0])
        y.sum().backward()
    assert not counts
    assert bias is down.bias


@grouped(1, tp=1, ep=1)
def test_expert_row_without_bias_needs_no_skip_bias_add():
    _, down = expert_layers(Config(expert_model_parallel_size=2), skip_bias_add=False)
    x = numbers(S, N, seed=1)
    torch.testing.assert_close(down(x)[0], F.linear(x, down.weight))


@grouped(2, tp=2, expert_tensor_parallel_size=1)
def test_experts_cut_otherwise_have_a_dp_group_of_their_own():
    config = tiny_config(expert_tensor_parallel_size=1, sequence_parallel=True)
    experts = torch.nn.ModuleList(expert_layers(config, bias=True, skip_bias_add=False))
    assert [p.allreduce for p in experts.parameters()] == [False] * 3
    assert build("column", D, N, config=config).weight.allreduce is True
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), experts)
    up, down = experts
    x = [numbers(S, D, seed=rank) for rank in range(2)]
    down(up(x[dist.get_rank()])[0])[0].sum().backward()
    finalize_model_grads([model])
    weights = [numbers(N, D, seed=7).requires_grad_(), numbers(D, N, seed=7).requires_grad_()]
    sum(F.linear(F.linear(own, weights[0]), weights[1]).sum() for own in x).backward()
    for layer, weight in zip((up, down), weights, strict=True):
        torch.testing.assert_close(layer.weight.main_grad, weight.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(down.bias.main_grad, torch.full((D,), 2.0 * S))  # not added up once more


@grouped(2, tp=2, ep=2, expert_tensor_parallel_size=1)
def test_biases_of_other_experts_are_not_added_up():
    """Megatron sums gradients of parameters with this mark over the dense layers' tensor-parallel ranks."""
    config = Config(expert_model_parallel_size=2, sequence_parallel=True)
    assert not expert_layers(config, bias=True)[1].bias.sequence_parallel
    assert build("row", N, D, config=config).bias.sequence_parallel
