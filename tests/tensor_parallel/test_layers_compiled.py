"""torch.compile takes every layer whole, collectives and all: no graph breaks, and the numbers of the plain run."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from megatron_ext.tensor_parallel._layers.megatron_linear_functions import (
    LinearWithFrozenWeight,
    LinearWithGradAccumulationAndAsyncCommunication,
)
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, build, symmetric_memory, world

pytestmark = pytest.mark.slow

D, N, V = 8, 16, 12


def layer_of(kind, **settings):
    more = {"gathered column": {"gather_output": True}, "whole row": {"input_is_parallel": False}}.get(kind, {})
    if kind == "embedding":
        more["reduce_scatter_embeddings"] = settings["sequence_parallel"]
    sizes = (V, D) if kind == "embedding" else (D, N)
    return build(kind.split()[-1], *sizes, config=Config(**settings), tp_group=world(), **more)


def input_of(kind):
    if kind == "embedding":
        return torch.randint(V, (2, 4))
    return torch.randn(4, 3, D // dist.get_world_size() if kind == "row" else D, requires_grad=True)


def run(function, layer, x):
    layer.zero_grad()
    x.grad = None
    y = function(x)
    y = y[0] if isinstance(y, tuple) else y
    y.sin().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


CASES = [(k, sp) for k in ("column", "gathered column", "row", "whole row", "embedding") for sp in (False, True)]
CASES.remove(("whole row", True))  # the layer refuses it
CASES = [(*case, False) for case in CASES] + [("column", True, True), ("row", True, True)]


@ranks(1, 2)
@pytest.mark.parametrize("kind,sequence_parallel,symmetric", CASES)
def test_whole_graph(kind, sequence_parallel, symmetric):
    with symmetric_memory() if symmetric else nullcontext():
        torch._dynamo.reset()
        layer, x = layer_of(kind, sequence_parallel=sequence_parallel, tp_comm_overlap=symmetric), input_of(kind)
        assert kind == "embedding" or layer.symmetric == (symmetric and dist.get_world_size() > 1)
        explained = torch._dynamo.explain(layer)(x)
        assert (explained.graph_count, explained.graph_break_count) == (1, 0)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(compiled, layer, x), run(layer, layer, x), rtol=1e-6, atol=1e-6)


@ranks(1, 2)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_whole_graph_into_main_grad(kind, frozen, autocast):
    torch._dynamo.reset()
    layer = layer_of(kind, gradient_accumulation_fusion=True)
    layer.weight.requires_grad_(not frozen)
    x = input_of(kind)
    results = []
    whole = torch.__version__ >= (2, 11)  # before, a traced backward sees no main_grad: the function runs as it is
    for function in (layer, torch.compile(layer, fullgraph=whole, backend="aot_eager")):
        layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.ones(layer.weight.shape), False
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y, dx, *grads = run(function, layer, x)
        assert layer.weight.grad_added_to_main_grad != frozen
        results.append([y, dx, grads[1], layer.weight.main_grad])  # the weight's own gradient is a dummy
        assert (grads[0] is None) == frozen
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    assert (layer.weight.main_grad == 1).all() == frozen


@ranks(1, 2)
def test_megatrons_functions_by_name():
    def whole(x, w, b):
        return LinearWithGradAccumulationAndAsyncCommunication.apply(x, w, b, False, True, False, None, None, world())

    def frozen(x, w, b):
        return LinearWithFrozenWeight.apply(x, w, b, True, world())

    for function in (whole, frozen):
        torch._dynamo.reset()
        results = []
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            torch.manual_seed(0)
            leaves = [torch.randn(shape, requires_grad=True) for shape in ((4, D), (N, D), (N,))]
            y = run(*leaves)
            y.sin().sum().backward()
            results.append([y.detach(), *(leaf.grad for leaf in leaves)])
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@ranks(1)
def test_deferred_weight_gradients_take_a_graph_break():
    """A compiled backward cannot keep pairs in a list: the layer runs as it is, or torch says so if it must not."""
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        inputs, grads = [], []
        config = Config(defer_embedding_wgrad_compute=True)
        buffers = {"embedding_activation_buffer": inputs, "grad_output_buffer": grads, "bias": False}
        layer = build("column", D, N, config=config, **buffers)
        x = input_of("column")
        for _ in range(2):
            y, dx, dw = run(torch.compile(layer, backend="aot_eager") if compiled else layer, layer, x)
        assert dw is None
        assert len(inputs) == len(grads) == 2
        layer.backward_dw()
        results.append((y, dx, layer.weight.grad))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Mutating a variable|side effect"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)


def test_tokens_whose_number_a_compiler_does_not_know():
    """Selecting by a mask gives such tokens; the compiler cannot ask whether they are contiguous."""
    torch._dynamo.reset()
    layer, x = layer_of("column", sequence_parallel=False), torch.randn(3, 4, D).transpose(0, 1)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    y, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, layer(x)[0])
