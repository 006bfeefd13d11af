"""ColumnParallelLinear and RowParallelLinear against torch.nn.functional.linear, with every option."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ext.distributed.counting import count_collectives
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, assert_pieces_as_good, build, numbers, piece, plain_linear, world

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


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("built, asked", [(False, None), (True, None), (True, False), (False, True)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column(sequence_parallel, built, asked, dtype):
    gather = built if asked is None else asked
    layer = column(gather_output=built, config=Config(sequence_parallel=sequence_parallel, params_dtype=dtype))
    b = set_bias(layer, 0)
    w, full, dy = (numbers(*s, seed=i, dtype=dtype) for s, i in (((N, D), 7), ((S, B, D), 1), ((S, B, N), 2)))
    x = (piece(full, 0) if sequence_parallel else full.clone()).requires_grad_()
    with count_collectives() as counts:
        y, bias = layer(x, runtime_gather_output=asked)
    y.backward(dy if gather else piece(dy, -1))
    assert bias is None
    alone = dist.get_world_size() == 1
    assert sum(counts.values()) == (0 if alone else sequence_parallel + gather)
    cuts = (None if gather else -1, 0 if sequence_parallel else None, 0, 0)
    results = (y.detach(), x.grad, layer.weight.grad, layer.bias.grad)
    plain, truth = (plain_linear(kind, full, w, b, dy) for kind in (dtype, torch.float64))
    assert_pieces_as_good(results, cuts, plain, truth)


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["parallel", "whole", "sequence"])
def test_row(kind, dtype):
    config = Config(sequence_parallel=kind == "sequence", params_dtype=dtype)
    layer = row(input_is_parallel=kind != "whole", config=config)
    b = set_bias(layer)
    w, full, dy = (numbers(*s, seed=i, dtype=dtype) for s, i in (((N, D), 7), ((S, B, D), 1), ((S, B, N), 2)))
    x = (full.clone() if kind == "whole" else piece(full, -1)).requires_grad_()
    y, bias = layer(x)
    y.backward(piece(dy, 0) if kind == "sequence" else dy)
    assert bias is None
    assert layer.bias.sequence_parallel == (kind == "sequence")
    db = layer.bias.grad
    if kind == "sequence":
        dist.all_reduce(db)  # as Megatron does for parameters with that mark
    cuts = (0 if kind == "sequence" else None, None if kind == "whole" else -1, 1, None)
    results = (y.detach(), x.grad, layer.weight.grad, db)
    plain, truth = (plain_linear(kind, full, w, b, dy) for kind in (dtype, torch.float64))
    assert_pieces_as_good(results, cuts, plain, truth)


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = column(config=config), row(config=config)
        outputs = [layer(torch.randn(S, D, requires_grad=True))[0] for layer in layers]
        sum(outputs).sum().backward()
    assert [y.shape for y in outputs] == [(S, N), (S, N)]
    assert not layers[0].sequence_parallel


def test_in_a_process_without_process_group():
    layer = build("column", D, N, config=SimpleNamespace())
    x = torch.randn(S, D)
    torch.testing.assert_close(layer(x)[0], F.linear(x, layer.weight, layer.bias))


@ranks(4)
def test_group_of_some_of_the_ranks():
    """Two groups of two ranks, no parallel_state: each pair is a world of its own, sequence parallelism too."""
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
