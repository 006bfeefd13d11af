"""Marks, copies, states, buffers and methods that Megatron and others ask of the layers beside the product."""

import contextlib
import copy
import functools
import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel import layers as stock

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel import layers as ours
from megatron_ext.tensor_parallel import vocab_parallel_cross_entropy
from megatron_ext.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from tests.gpt import grouped, ours_everywhere, tiny_config
from tests.ranks import ranks
from tests.tensor_parallel.sharded import CLASSES, Config, build, numbers, piece, world
from tests.tensor_parallel.test_layers import B, D, N, S, column, init, row
from tests.tensor_parallel.test_linear import cut
from tests.tensor_parallel.test_recompute import saved_tensors


@ranks(1, 2)
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("perform", [True, False])
def test_attributes_are_always_there(perform, on_cpu):
    config = Config(perform_initialization=perform, use_cpu_initialization=on_cpu)
    for layer, dim in ((column(config=config, stride=2, name="fc"), 0), (row(config=config, stride=2, name="fc"), 1)):
        weight, bias = layer.weight, layer.bias
        assert layer.name == "fc"
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
    assert vars(copy_of_w) == {**vars(w), "expert_tp": False, "qkv_split_shapes": None}
    assert vars(fresh) == {
        "expert_tp": False,
        "is_qkv": False,
        "qkv_split_shapes": None,
        "tensor_model_parallel": False,
        "partition_dim": -1,
        "partition_stride": 1,
    }


@ranks(1, 2)
def test_repr_is_true():
    tp = dist.get_world_size()
    for bias in (False, True):
        for config in (Config(), Config(sequence_parallel=True)):
            for layer, name, *sent in (
                (column, "Column", "backward all-reduce", "forward all-gather"),
                (row, "Row", "forward all-reduce", "forward reduce-scatter"),
            ):
                text = repr(layer(bias=bias, config=config))
                begins = f"{name}ParallelLinear(in_features={D}, out_features={N}, bias={bias}, TP={tp}, "
                assert text.startswith(begins)
                assert f"communication={'none' if tp == 1 else sent[config.sequence_parallel]}" in text


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
def test_state_dict_has_extra_state_of_te_layers():
    layer, other = column(), column()
    state = layer.state_dict(prefix="a.")
    assert list(state) == ["a.weight", "a.bias", "a._extra_state"]
    assert state["a._extra_state"] is None
    with torch.no_grad():
        layer.weight.add_(1)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items() if tensor is not None}
    other.load_state_dict(state, strict=True)  # a checkpoint of plain linear layers
    torch.testing.assert_close(other.weight, layer.weight)
    other.load_state_dict({**state, "_extra_state": torch.zeros(3)}, strict=True)
    assert set(state) == {"weight", "bias"}


@ranks(1, 2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize(
    "shape, sequence_parallel", [((D,), False), ((S, D), False), ((S, B, D), False), ((S, B, D), True)], ids=str
)
def test_deferred_weight_gradient_of_the_output_layer(shape, sequence_parallel, limit, fused):
    """GPTModel's buffers hold as many steps as the limit allows, none of an evaluation; drained, they are summed."""
    config = Config(sequence_parallel=sequence_parallel, gradient_accumulation_fusion=fused)
    config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = True, limit
    inputs, grads = [], []
    layer = column(config=config, bias=False, embedding_activation_buffer=inputs, grad_output_buffer=grads)
    other = column(config=config, bias=False)  # a layer without buffers defers nothing
    w, expected = numbers(N, D, seed=7), torch.zeros(N, D)
    for each in (layer, other):
        each.weight.main_grad = torch.zeros(each.weight.shape)
    for step in range(3):
        full, dy = numbers(*shape, seed=step), numbers(*shape[:-1], N, seed=10 + step)
        expected += dy.view(-1, N).t() @ full.view(-1, D)
        x = (piece(full, 0) if sequence_parallel else full).requires_grad_()
        with torch.no_grad():
            layer(x)
        for each in (layer, other):
            x.grad = None
            each(x)[0].backward(piece(dy, -1))
            torch.testing.assert_close(x.grad, cut(dy @ w, "sequence" if sequence_parallel else "replicated"))
        assert len(inputs) == len(grads) == min(step + 1, limit or 3)
    with count_collectives() as counts:
        layer.backward_dw()
    assert counts.total() == (limit or 3) * (sequence_parallel and dist.get_world_size() > 1)
    assert inputs == grads == []
    for each in (layer, other):
        found = each.weight.main_grad if fused else each.weight.grad
        torch.testing.assert_close(found, piece(expected, 0), rtol=1e-5, atol=1e-4)
    layer.backward_dw()  # nothing left to do


@ranks(1)
def test_marks_what_is_saved_for_an_offloading_context():
    """Megatron's CPU offloading decides by an attribute of the saved tensor; Transformer Engine is not needed."""
    config = Config(_cpu_offloading_context=SimpleNamespace(inside_context=True), cpu_offloading_activations=True)
    for layer in (column(config=config), row(config=config)):
        x = torch.randn(S, D)
        with saved_tensors() as saved:
            layer(x)
        assert saved[0] is x
        assert saved[0].activation_offloading is True
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
    options = {"config": config, "init_method": init, "bias": True, "tp_group": world(), **CLASSES[kind][1]}
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


@grouped(2)
def test_attributes_of_megatrons_layers():
    config = tiny_config()
    for name in CLASSES:
        sizes = (N, D) if name == "embedding" else (D, N)
        theirs, mine = (build(name, *sizes, package=package, config=config) for package in (stock, ours))
        own = {key: value for key, value in vars(theirs).items() if key not in vars(torch.nn.Module())}
        assert own
        for key, value in own.items():
            assert getattr(mine, key) == value, (name, key)
        for key in [*dir(type(theirs)), "weight", "bias"]:
            assert hasattr(mine, key) or not hasattr(theirs, key), (name, key)


@grouped(2)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("home", ["megatron", "ours"])
def test_layers_call_a_replaced_linear_function(home, frozen):
    """Quantizers replace the function in its module while a layer runs, and quantize what it is given."""
    module = stock if home == "megatron" else ours
    name = "linear_with_frozen_weight" if frozen else "linear_with_grad_accumulation_and_async_allreduce"
    original = getattr(module, name)

    @functools.wraps(original)
    def quantized(input, weight, *args, **kwargs):
        return original(input.round(decimals=1), weight.round(decimals=1), *args, **kwargs)

    results = {}
    for package in (stock, ours):
        for kind in ("column", "row"):
            layer = build(kind, D, N, config=tiny_config(), package=package)
            with torch.no_grad():
                layer.weight.copy_(piece(numbers(N, D, seed=2), 0 if kind == "column" else 1))
            layer.weight.requires_grad_(not frozen)
            x = numbers(S, B, D, seed=1)
            x = (piece(x, -1) if kind == "row" else x).requires_grad_()
            replaced = module if package is ours else stock
            with mock.patch.object(replaced, name, quantized):
                y, _ = layer(x)
            y.square().sum().backward()
            results[package, kind] = y.detach(), x.grad, layer.weight.grad
    for kind in ("column", "row"):
        torch.testing.assert_close(results[ours, kind], results[stock, kind])


@grouped(1)
@pytest.mark.parametrize(
    "kind, place",
    [
        ("column", "layers.copy_to_tensor_model_parallel_region"),
        ("column", "layers.reduce_from_tensor_model_parallel_region"),
        ("column", "mappings._reduce"),
        ("column", "mappings._CopyToModelParallelRegion"),
        ("embedding", "layers.reduce_from_tensor_model_parallel_region"),
        ("embedding", "mappings._reduce"),
    ],
)
@pytest.mark.parametrize("substituted", [False, True])
def test_a_replaced_function_that_layers_do_not_call_is_told(kind, place, substituted):
    with ours_everywhere() if substituted else contextlib.nullcontext():
        module, name = place.split(".")
        home = importlib.import_module(f"megatron.core.tensor_parallel.{module}")
        linear = kind == "column"
        layer = build(kind, *((D, N) if linear else (8, D)), config=tiny_config())
        x = numbers(S, B, D, seed=1) if linear else torch.arange(6).view(2, 3)
        plain = layer(x)[0]
        original = getattr(home, name)

        def counted(*args, **kwargs):
            return original(*args, **kwargs)

        said = f"{place} was replaced, and megatron_ext's {'linear layers' if linear else 'embeddings'} do not call it"
        with (
            mock.patch.object(home, name, functools.wraps(original, updated=())(counted)),
            pytest.raises(RuntimeError, match=said),
        ):
            layer(x)
        assert torch.equal(layer(x)[0], plain)


@grouped(1)
def test_replaced_parts_of_the_loss_of_logits_are_told():
    """Patch managers replace parts after the substitution; a call of ours by its own name is none of Megatron's."""
    logits, labels = numbers(S, B, 8, seed=1), torch.zeros(S, B, dtype=torch.int64)
    plain = vocab_parallel_cross_entropy(logits, labels)
    other = mock.patch.object(cross_entropy, "VocabParallelCrossEntropy", type("Other", (), {}))
    with other:
        assert torch.equal(vocab_parallel_cross_entropy(logits, labels), plain)
    with ours_everywhere():
        owner = cross_entropy.VocabParallelCrossEntropy
        method = mock.patch.object(owner, "calculate_logits_max", staticmethod(lambda x: (x, x.amax(-1))))
        for change in (other, method):
            with (
                change,
                pytest.raises(RuntimeError, match="VocabParallelCrossEntropy.* was replaced, and megatron"),
            ):
                cross_entropy.vocab_parallel_cross_entropy(logits, labels)
        assert torch.equal(cross_entropy.vocab_parallel_cross_entropy(logits, labels), plain)


@grouped(1)
def test_a_replaced_autograd_class_is_called_or_refused():
    autograd = stock.LinearWithGradAccumulationAndAsyncCommunication
    layer, x = build("column", D, N, config=tiny_config()), numbers(S, B, D, seed=1)
    plain = layer(x)[0]

    class Doubling(autograd):
        @staticmethod
        def forward(ctx, input, *args):
            return 2 * autograd.forward(ctx, input, *args)

    with mock.patch.object(stock, autograd.__name__, Doubling):
        torch.testing.assert_close(layer(x)[0], 2 * plain)
    forward = autograd.forward
    with mock.patch.object(autograd, "forward", staticmethod(lambda *args: 3 * forward(*args))):
        torch.testing.assert_close(layer(x)[0], 3 * plain)
    torch.testing.assert_close(layer(x)[0], plain, rtol=0, atol=0)
    refused = pytest.raises(RuntimeError, match="LinearWithGradAccumulationAndAsyncCommunication was replaced")
    with mock.patch.object(ours, autograd.__name__, Doubling), refused:
        layer(x)


@grouped(1)
def test_subclass_of_megatrons_autograd_function_stays():
    """Python refuses another base for it: the substitution leaves it as the user wrote it."""
    autograd = stock.LinearWithGradAccumulationAndAsyncCommunication

    class Doubling(autograd):
        @staticmethod
        def forward(ctx, input, *args):
            return 2 * autograd.forward(ctx, input, *args)

    x, weight = numbers(S, B, D, seed=1), numbers(N, D, seed=2)
    given = (x, weight, None, False, False, False, None, 0, dist.group.WORLD)
    before = Doubling.apply(*given)
    with ours_everywhere():
        assert Doubling.__bases__ == (autograd,)
        assert torch.equal(Doubling.apply(*given), before)
        torch.testing.assert_close(before, 2 * x @ weight.T)


def test_a_users_function_is_called_without_megatron(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("megatron.core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(ours, "linear_with_grad_accumulation_and_async_allreduce", lambda *_, **__: "theirs")
    assert column(config=Config())(torch.ones(2, D))[0] == "theirs"
