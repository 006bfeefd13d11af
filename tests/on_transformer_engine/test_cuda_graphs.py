"""Ours inside and beside the CUDA graphs that Megatron captures: replayed, a model trains as it does without them."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from megatron_on_cpu import cuda_graphs
from tests.gpt import (
    SEQUENCE,
    data_parallel,
    forward_step,
    make_optimizer,
    tiny_batches,
    tiny_gpt,
    train_step,
)
from tests.marks import slow
from tests.megatron_on_cpu.test_resume import seed
from tests.on_transformer_engine.models import ENGINE, any_tracker, assert_same_steps, te_spec
from tests.on_transformer_engine.test_ours import beside_spec, in_the_way
from tests.on_transformer_engine.test_overlap import BF16
from tests.ranks import ranks

STEPS, MICRO_BATCHES, LAYER_COUNT = 4, 2, 2
BY_LAYER = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1}
BY_ENGINE = {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 1}


def whole_steps():
    """The settings that have all of a step but the optimizer in one graph."""
    from megatron.core.transformer import TransformerConfig

    if hasattr(TransformerConfig, "cuda_graph_modules"):  # since 0.20
        return {"cuda_graph_impl": "full_iteration"}
    return {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}


@contextmanager
def counted_replays():
    """Yields a list with one entry for each graph that is replayed inside; no graph is left afterwards."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper as Full
    from megatron.core.full_cuda_graph import StaticBufferLoader
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    found = []
    replay = cuda_graphs.CUDAGraph.replay
    try:
        with mock.patch.object(cuda_graphs.CUDAGraph, "replay", lambda graph: (found.append(1), replay(graph))):
            yield found
    finally:
        delete_cuda_graphs()
        for kept, value in ((Full.curr_iteration, 0), (Full.cuda_graph, None), (Full.result, None)):
            kept.update(training=value)
        StaticBufferLoader.static_buffers["training"].clear()


def captured_by_engine(chunks, optimizer):
    """Captures graphs as Megatron's training loop does after its warm-up steps."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    calculator.init_num_microbatches_calculator(0, None, 2 * MICRO_BATCHES, 2, 1)
    TECudaGraphHelper(chunks, chunks[0].config, SEQUENCE, 2, [optimizer]).create_cudagraphs()
    calculator.destroy_num_microbatches_calculator()


def in_one_graph(schedule):
    """Megatron's wrapper around a schedule; it takes batches by name."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    def step(batches, model):
        return forward_step(iter([next(batches)["tokens"]]), model)

    def call(*, data_iterator, forward_step_func, **kwargs):
        batches = [iter([{"tokens": tokens_BS} for tokens_BS in one]) for one in data_iterator]
        return whole(data_iterator=batches, forward_step_func=step, **kwargs)

    whole = FullCudaGraphWrapper(schedule, 1)
    return call


def trained(way, settings, **overrides):
    """The loss and the norm of each step, on Transformer Engine's tracker, and how many graphs were replayed."""
    from megatron.core import pipeline_parallel

    seed(11, True, reset=True)
    with ExitStack() as stack:
        stack.enter_context(in_the_way(way))
        replays = stack.enter_context(counted_replays())
        spec = beside_spec if way == "spec" else te_spec
        chunks = data_parallel(tiny_gpt(spec, **ENGINE | overrides | settings))
        optimizer = make_optimizer(chunks)
        seed(11, True)
        if settings and settings == whole_steps():
            schedule = in_one_graph(pipeline_parallel.get_forward_backward_func())
            asked = mock.patch.object(pipeline_parallel, "get_forward_backward_func", return_value=schedule)
            stack.enter_context(asked)
        steps = []
        for tokens_BS in tiny_batches(STEPS):
            if settings == BY_ENGINE and len(steps) == 1:
                captured_by_engine(chunks, optimizer)
            steps.append(train_step(chunks, optimizer, tokens_BS))
    return torch.tensor(steps, dtype=torch.float64), len(replays)


WAYS = ["both", *slow("patch", "spec")]


@ranks(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_of_each_layer(way):
    from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord as Record

    with any_tracker():
        eager, none = trained("stock", {})
        stock, replays = trained("stock", BY_LAYER)
        found, ours = trained(way, BY_LAYER)
    assert none == 0
    # Forward and backward, in every step after the one that captures them.
    assert replays == ours == (STEPS - 1) * MICRO_BATCHES * 2 * LAYER_COUNT
    assert_same_steps(found, stock)
    # Before 0.20 the graph of a layer's backward is lent memory that another layer's backward has yet to read.
    later = STEPS if hasattr(Record, "_enable_saved_tensors_observer") else 1
    assert_same_steps(stock[:later], eager[:later])
    assert_same_steps(stock, eager, losses=1e-5, norms=5e-3)


@pytest.mark.slow
@ranks(1)
@pytest.mark.parametrize("way", WAYS)
def test_graphs_made_by_transformer_engine(way):
    with any_tracker():
        eager, none = trained(way, {}, **BF16)  # which these graphs of Megatron's ask for
        found, replays = trained(way, BY_ENGINE, **BF16)
    assert none == 0
    assert replays == (STEPS - 1) * MICRO_BATCHES * 2 * LAYER_COUNT
    assert_same_steps(found, eager)


@ranks(1)
@pytest.mark.parametrize("way", WAYS)
def test_one_graph_of_a_step(way):
    with any_tracker():
        eager, none = trained("stock", {})
        found, replays = trained(way, whole_steps())
    assert none == 0
    assert replays == STEPS - 1
    assert_same_steps(found, eager)


@pytest.mark.slow
@ranks(2)
def test_graphs_of_layers_with_collectives_and_dropout():
    overrides = {"sequence_parallel": True, "hidden_dropout": 0.2, "attention_dropout": 0.2, "tied": False}
    with any_tracker(tp=2):
        stock, _ = trained("stock", BY_LAYER, **overrides)
        found, replays = trained("both", BY_LAYER, **overrides)
        without, _ = trained("stock", BY_LAYER, sequence_parallel=True, tied=False)
    assert replays == (STEPS - 1) * MICRO_BATCHES * 2 * LAYER_COUNT
    assert_same_steps(found, stock)
    assert (stock[:, 0] - without[:, 0]).abs().min() > 1e-3, "there is dropout"
