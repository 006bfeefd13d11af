"""ColumnParallelLinear and RowParallelLinear against torch.nn.functional.linear, with every option."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from tests.gpt import model_parallel
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, assert_as_good, numbers, piece, world

S, B, D, N = 8, 3, 16, 24


def init(weight):
    """Weights that depend on the shape of the full weight alone."""
    weight.copy_(numbers(*weight.shape, seed=7))


def column(**options):
    config = options.pop("config", Config())
    return ColumnParallelLinear(D, N, config=config, init_method=init, **{"tp_group": world(), **options})


def row(**options):
    config = options.pop("config", Config())
    defaults = {"bias": True, "input_is_parallel": True, "skip_bias_add": False, "tp_group": world()}
    return RowParallelLinear(D, N, config=config, init_method=init, **{**defaults, **options})


def set_bias(layer, dim=None):
    full = numbers(N, seed=8, dtype=layer.bias.dtype)
    with torch.no_grad():
        layer.bias.copy_(full if dim is None else piece(full, dim))
    return full


def plain(dtype, x, w, b, dy):
    x, w, b = (t.detach().to(dtype, copy=True).requires_grad_() for t in (x, w, b))
    y = F.linear(x, w, b)
    return y.detach(), *torch.autograd.grad(y, (x, w, b), dy.to(dtype))


def check(results, cuts, like, truth):
    for actual, dim, l, t in zip(results, cuts, like, truth, strict=True):
        assert_as_good(actual, l if dim is None else piece(l, dim), t if dim is None else piece(t, dim))


# -- values ------------------------------------------------------------------------------------------------------------


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column(sequence_parallel, gather, dtype):
    layer = column(gather_output=gather, config=Config(sequence_parallel=sequence_parallel, params_dtype=dtype))
    b = set_bias(layer, 0)
    w, full, dy = (numbers(*s, seed=i, dtype=dtype) for s, i in (((N, D), 7), ((S, B, D), 1), ((S, B, N), 2)))
    x = (piece(full, 0) if sequence_parallel else full.clone()).requires_grad_()
    with count_collectives() as counts:
        y, bias = layer(x)
    y.backward(dy if gather else piece(dy, -1))
    assert bias is None
    alone = dist.get_world_size() == 1
    assert sum(counts.values()) == (0 if alone else sequence_parallel + gather)
    cuts = (None if gather else -1, 0 if sequence_parallel else None, 0, 0)
    results = (y.detach(), x.grad, layer.weight.grad, layer.bias.grad)
    check(results, cuts, plain(dtype, full, w, b, dy), plain(torch.float64, full, w, b, dy))


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
    check(results, cuts, plain(dtype, full, w, b, dy), plain(torch.float64, full, w, b, dy))


@ranks(1, 2)
def test_runtime_gather_output():
    w, x = numbers(N, D, seed=7), numbers(S, D, seed=1)
    for built, asked in [(False, None), (True, None), (True, False), (False, True)]:
        layer = column(gather_output=built, bias=False)
        y, _ = layer(x, runtime_gather_output=asked)
        whole = F.linear(x, w)
        torch.testing.assert_close(y, whole if (built if asked is None else asked) else piece(whole, -1))


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


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_frozen_weights_give_gradients_only_where_asked(sequence_parallel):
    for layer, x in ((column(), torch.randn(S, D)), (row(), torch.randn(S, D // 2))):
        layer.weight.requires_grad_(False)
        with count_collectives() as counts:
            layer(x)[0].sum().backward()
        assert layer.weight.grad is None
        assert layer.bias.grad is not None
        assert sum(counts.values()) == (layer.__class__ is RowParallelLinear)


@ranks(2)
def test_collectives_of_a_whole_mlp():
    """Two layers: one all-reduce forward and one backward; under sequence parallelism 2 forward and 3 backward."""
    for sequence_parallel, expected in ((False, (1, 1)), (True, (2, 3))):
        config = Config(sequence_parallel=sequence_parallel)
        up = column(config=config)
        down = RowParallelLinear(
            *(N, D),
            config=config,
            init_method=init,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=world(),
        )
        x = torch.randn(4, 2, D, requires_grad=True)
        with count_collectives() as forward:
            y = down(torch.tanh(up(x)[0]))[0]
        with count_collectives() as backward:
            y.square().sum().backward()
        assert (sum(forward.values()), sum(backward.values())) == expected
        assert y.shape == x.shape


@ranks(1)
def test_sequence_parallel_alone_is_nothing():
    config = Config(sequence_parallel=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = column(config=config), row(config=config)
        outputs = [layer(torch.randn(S, D))[0] for layer in layers]
    assert [y.shape for y in outputs] == [(S, N), (S, N)]
    assert not layers[0].sequence_parallel


def test_in_a_process_without_process_group():
    layer = ColumnParallelLinear(D, N, config=SimpleNamespace(), init_method=torch.nn.init.normal_)
    x = torch.randn(S, D)
    torch.testing.assert_close(layer(x)[0], F.linear(x, layer.weight, layer.bias))


@ranks(4)
def test_group_of_some_of_the_ranks():
    """Two groups of two ranks, no parallel_state: each pair is a world of its own, sequence parallelism too."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    try:
        layer = column(tp_group=mine, config=Config(sequence_parallel=True), bias=False)
        full = numbers(S, D, seed=dist.get_rank() // 2)
        x = full.chunk(2)[dist.get_rank() % 2].clone().requires_grad_()
        y, _ = layer(x)
        torch.testing.assert_close(y, F.linear(full, numbers(N, D, seed=7).chunk(2)[dist.get_rank() % 2]))
        with pytest.raises(ValueError, match="tp_group does not hold this rank"):
            column(tp_group=pairs[1 - dist.get_rank() // 2])
    finally:
        for group in pairs:
            dist.destroy_process_group(group)


# -- experts -----------------------------------------------------------------------------------------------------------


def expert_layers(config, **options):
    up = ColumnParallelLinear(D, N, config=config, init_method=init, is_expert=True, bias=False)
    down = RowParallelLinear(
        *(N, D),
        config=config,
        init_method=init,
        is_expert=True,
        input_is_parallel=True,
        **{"bias": False, "skip_bias_add": True, **options},
    )
    return up, down


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
    assert up.explicit_expert_comm
    assert up.weight.allreduce is True  # no expert parallelism


@ranks(2)
def test_experts_of_expert_parallelism():
    """Expert tensor parallel size 1 within tensor parallel size 2: whole experts, kept out of data-parallel sums."""
    with model_parallel(tp=2, ep=2, expert_tensor_parallel_size=1):
        up, down = expert_layers(Config(expert_model_parallel_size=2), bias=True)
        assert up.weight.shape == (N, D)
        assert [p.allreduce for layer in (up, down) for p in layer.parameters()] == [False] * 3
        dense = ColumnParallelLinear(D, N, config=Config(expert_model_parallel_size=2), init_method=init)
        assert dense.weight.shape == (N // 2, D)
        assert dense.weight.allreduce is True
        assert not dense.explicit_expert_comm
        x = torch.randn(S, D, requires_grad=True)
        with count_collectives() as counts:
            y, bias = down(up(x)[0])
            y.sum().backward()
        assert not counts
        assert bias is down.bias


@ranks(1)
def test_expert_row_without_bias_needs_no_skip_bias_add():
    with model_parallel(tp=1, ep=1):
        _, down = expert_layers(Config(expert_model_parallel_size=2), skip_bias_add=False)
        down(torch.randn(S, N))


# -- what others ask of the layers -------------------------------------------------------------------------------------


@ranks(1, 2)
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("perform", [True, False])
def test_attributes_are_always_there(perform, on_cpu):
    config = Config(perform_initialization=perform, use_cpu_initialization=on_cpu)
    for layer, dim in ((column(config=config, stride=2), 0), (row(config=config, stride=2), 1)):
        weight, bias = layer.weight, layer.bias
        assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, dim, 2)
        assert weight.allreduce is bias.allreduce is True
        assert getattr(bias, "tensor_model_parallel", False) == (dim == 0)
        assert torch.isnan(weight).all() == (not perform)  # torch.empty is filled with NaN in tests
    assert bias.sequence_parallel is False


@ranks(2)
def test_attribute_functions():
    w, copy_of_w = torch.zeros(2), torch.zeros(2)
    assert param_is_not_tensor_parallel_duplicate(w, world()) == (dist.get_rank() == 0)
    set_tensor_model_parallel_attributes(w, True, 1, 3)
    set_tensor_model_parallel_attributes(w, True, 1, 3)
    assert param_is_not_tensor_parallel_duplicate(w, world())
    with pytest.raises(ValueError, match="partition_dim of the tensor is already 1, not 0"):
        set_tensor_model_parallel_attributes(w, True, 0, 3)
    assert w.partition_dim == 1
    w.is_qkv = True
    copy_tensor_model_parallel_attributes(copy_of_w, w)
    assert vars(copy_of_w) == vars(w)
    set_defaults_if_not_set_tensor_model_parallel_attributes(copy_of_w)
    fresh = torch.zeros(2)
    set_defaults_if_not_set_tensor_model_parallel_attributes(fresh)
    assert vars(copy_of_w) == {**vars(w), "expert_tp": False}
    assert vars(fresh) == {
        "expert_tp": False,
        "is_qkv": False,
        "tensor_model_parallel": False,
        "partition_dim": -1,
        "partition_stride": 1,
    }


@ranks(1, 2)
def test_repr_is_true():
    tp = dist.get_world_size()
    for bias in (False, True):
        for config in (Config(), Config(sequence_parallel=True)):
            text = repr(column(bias=bias, config=config))
            assert text.startswith(f"ColumnParallelLinear(in_features={D}, out_features={N}, bias={bias}, TP={tp}, ")
            sent = "forward all-gather" if config.sequence_parallel else "backward all-reduce"
            assert f"communication={'none' if tp == 1 else sent}" in text
            text = repr(row(bias=bias, config=config))
            assert text.startswith(f"RowParallelLinear(in_features={D}, out_features={N}, bias={bias}, TP={tp}, ")
            sent = "forward reduce-scatter" if config.sequence_parallel else "forward all-reduce"
            assert f"communication={'none' if tp == 1 else sent}" in text


@ranks(1, 2)
@pytest.mark.parametrize("layer", [column, row], ids=["column", "row"])
def test_deepcopy(layer):
    original = layer(stride=2)
    original.weight.main_grad = torch.zeros(3)
    clone = copy.deepcopy(original)
    assert clone.tp_group is original.tp_group
    marks = {k: v for k, v in vars(original.weight).items() if k != "main_grad"}
    assert vars(clone.weight) == marks
    assert vars(clone.bias) == vars(original.bias)
    x = torch.randn(4, 2, original.weight.shape[1])
    torch.testing.assert_close(clone(x), original(x), rtol=0, atol=0)
    with torch.no_grad():
        clone.weight.zero_()
    assert original.weight.any()
    assert repr(clone) == repr(original)


@ranks(1)
def test_state_dict_has_the_extra_state_of_transformer_engines_layers():
    layer, other = column(), column()
    state = layer.state_dict(prefix="a.")
    assert list(state) == ["a.weight", "a.bias", "a._extra_state"]
    assert state["a._extra_state"] is None
    with torch.no_grad():
        layer.weight.add_(1)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items() if tensor is not None}
    assert set(state) == {"weight", "bias"}
    other.load_state_dict(state, strict=True)  # a checkpoint of plain linear layers
    torch.testing.assert_close(other.weight, layer.weight)
    other.load_state_dict({**state, "_extra_state": torch.zeros(3)}, strict=True)
    assert set(state) == {"weight", "bias"}


@ranks(1)
def test_no_warnings_in_a_step():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            row()(column(config=Config())(torch.randn(S, D, requires_grad=True))[0][..., :D])[0].sum().backward()


@ranks(1)
def test_gradient_accumulation_fusion_without_apex():
    config = Config(gradient_accumulation_fusion=True)
    for layer in (column(config=config), row(config=config)):
        layer.weight.main_grad = torch.ones(N, D)
        x, dy = numbers(S, D, seed=1), numbers(S, N, seed=2)
        layer(x)[0].backward(dy)
        torch.testing.assert_close(layer.weight.main_grad, 1 + dy.t() @ x, rtol=1e-5, atol=1e-5)


@ranks(1, 2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_deferred_weight_gradient_of_the_output_layer(sequence_parallel):
    """The buffers of GPTModel, an evaluation in between, and the layer's own way to finish."""
    config = Config(sequence_parallel=sequence_parallel, gradient_accumulation_fusion=True)
    config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = True, 2
    inputs, grads = [], []
    layer = column(config=config, bias=False, embedding_activation_buffer=inputs, grad_output_buffer=grads)
    other = column(config=config, bias=False)  # a layer without buffers defers nothing
    layer.weight.main_grad, other.weight.main_grad = torch.zeros(layer.weight.shape), torch.zeros(layer.weight.shape)
    for step in range(3):
        full, dy = numbers(S, B, D, seed=step), numbers(S, B, N, seed=10 + step)
        x = piece(full, 0) if sequence_parallel else full
        with torch.no_grad():
            layer(x)
        for each in (layer, other):
            each(x)[0].backward(piece(dy, -1))
        assert len(inputs) == len(grads) == min(step + 1, 2)
    assert not torch.allclose(layer.weight.main_grad, other.weight.main_grad)
    layer.backward_dw()
    assert inputs == grads == []
    torch.testing.assert_close(layer.weight.main_grad, other.weight.main_grad, rtol=1e-5, atol=1e-4)
    layer.backward_dw()  # nothing left to do


@ranks(1)
def test_marks_what_is_saved_for_an_offloading_context():
    """Megatron's CPU offloading decides by an attribute of the saved tensor; Transformer Engine is not needed."""
    saved = []
    config = Config(_cpu_offloading_context=SimpleNamespace(inside_context=True), cpu_offloading_activations=True)
    for layer in (column(config=config), row(config=config)):
        x = torch.randn(S, D)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            layer(x)
        assert saved[0] is x
        assert saved[0].activation_offloading is True
        saved.clear()
    config._cpu_offloading_context.inside_context = False
    x = torch.randn(S, D)
    column(config=config)(x)
    assert not hasattr(x, "activation_offloading")


@ranks(1, 2)
@pytest.mark.parametrize("layer", [column, row], ids=["column", "row"])
def test_saved_activations_may_leave_the_device(layer):
    mine = layer()
    shape = (S, mine.weight.shape[1])
    x = torch.randn(shape, requires_grad=True)
    mine(x)[0].square().sum().backward()
    expected, mine.weight.grad, x.grad = (x.grad, mine.weight.grad), None, None
    with torch.autograd.graph.save_on_cpu():
        y = mine(x)[0]
    y.square().sum().backward()
    torch.testing.assert_close((x.grad, mine.weight.grad), expected, rtol=0, atol=0)


# -- bad input ---------------------------------------------------------------------------------------------------------


@ranks(4)
def test_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="output_size is 10: it must divide by the 4 .*; pad it to 12"):
        ColumnParallelLinear(D, 10, config=Config(), init_method=init, tp_group=world())
    with pytest.raises(ValueError, match="input_size is 18: .*pad it to 20"):
        RowParallelLinear(
            *(18, N),
            config=Config(),
            init_method=init,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=world(),
        )


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


@ranks(1, 2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_subclass_with_a_matmul_of_its_own(kind, sequence_parallel):
    """Quantisers and adapters replace Megatron's `_forward_impl`, on the class or the object: ours goes through it."""
    base = ColumnParallelLinear if kind == "column" else RowParallelLinear
    calls = []

    class Doubling(base):
        def _forward_impl(self, input, weight, *args, **kwargs):
            calls.append(kwargs)
            return super()._forward_impl(input, 2 * weight, *args, **kwargs)

    config = Config(sequence_parallel=sequence_parallel)
    more = {} if kind == "column" else {"input_is_parallel": True, "skip_bias_add": False}
    options = {"config": config, "init_method": init, "bias": True, "tp_group": world(), **more}
    x = numbers(S, B, D, seed=1)
    if kind == "row" or sequence_parallel:
        x = piece(x, -1 if kind == "row" else 0)

    def results(layer):
        own = x.clone().requires_grad_()
        y, _ = layer(own)
        y.square().sum().backward()
        return y.detach(), own.grad, layer.bias.grad

    plain, doubling, frozen = base(D, N, **options), Doubling(D, N, **options), Doubling(D, N, **options)
    with torch.no_grad():
        plain.weight.mul_(2)
        plain.bias.fill_(3)
        doubling.bias.fill_(3)
        frozen.bias.fill_(3)
    frozen.weight.requires_grad_(False)
    expected = results(plain)
    torch.testing.assert_close(results(doubling), expected)
    torch.testing.assert_close(results(frozen), expected)
    torch.testing.assert_close(doubling.weight.grad, 2 * plain.weight.grad)
    alone = dist.get_world_size() == 1
    assert len(calls) == 2
    assert calls[0]["sequence_parallel"] == (kind == "column" and sequence_parallel and not alone)
    assert calls[0]["allreduce_dgrad"] == (kind == "column" and not sequence_parallel and not alone)
    assert calls[0].keys() >= {"bias", "gradient_accumulation_fusion", "grad_output_buffer", "tp_group"}

    replaced = base(D, N, **options)
    replaced._forward_impl = lambda input, weight, *args, **kwargs: input.new_ones(
        S, B, N // (1 if kind == "row" else dist.get_world_size())
    )
    y, _ = replaced(x)
    ranks_ = dist.get_world_size() if kind == "row" else 1
    assert (y == ranks_).all()


@ranks(2)
def test_attributes_of_megatrons_layers():
    """Whatever an object of Megatron's layers carries, ours carries too, with the same value."""
    with model_parallel(tp=2):
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel import layers as stock

        from megatron_ext.tensor_parallel import layers as ours

        config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)
        builders = {
            "ColumnParallelLinear": lambda kind: kind(D, N, config=config, init_method=init),
            "RowParallelLinear": lambda kind: kind(
                D, N, config=config, init_method=init, bias=True, input_is_parallel=True, skip_bias_add=False
            ),
            "VocabParallelEmbedding": lambda kind: kind(N, D, config=config, init_method=init),
        }
        for name, build in builders.items():
            theirs, mine = build(getattr(stock, name)), build(getattr(ours, name))
            own = {key: value for key, value in vars(theirs).items() if key not in vars(torch.nn.Module())}
            assert own
            for key, value in own.items():
                assert getattr(mine, key) == value, (name, key)
            for key in [*dir(type(theirs)), "weight", "bias"]:
                assert hasattr(mine, key) or not hasattr(theirs, key), (name, key)
