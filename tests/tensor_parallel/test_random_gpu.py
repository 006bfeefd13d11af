"""CUDA: the device's generator, states that CUDA graphs carry on, and recomputation in the engine's own threads."""

import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.tensor_parallel import random
from megatron_ext.tensor_parallel.random import CheckpointWithoutOutput, CudaRNGStatesTracker, checkpoint
from tests.tensor_parallel.sharded import drawn as drawn_on
from tests.tensor_parallel.sharded import no_tracker

pytestmark = pytest.mark.gpu
GRAPH_SAFE = pytest.mark.parametrize("graph_safe", [False, True], ids=["bytes", "generators"])


drawn = partial(drawn_on, device="cuda")


@pytest.fixture
def seeded(graph_safe):
    with no_tracker():
        random.model_parallel_cuda_manual_seed(5, use_cudagraphable_rng=graph_safe)
        yield random.get_cuda_rng_tracker()


@GRAPH_SAFE
def test_streams_are_those_of_the_device(seeded):
    assert torch.equal(torch.rand(4, device="cuda"), drawn(5, 4)[0])
    parts = []
    with seeded.fork():
        parts.append(torch.rand(3, device="cuda"))
        with seeded.fork("expert-parallel-rng"):
            assert torch.equal(torch.rand(4, device="cuda"), drawn(5 + 1024, 4)[0])
            with seeded.fork():
                parts.append(torch.rand(5, device="cuda"))
        parts.append(torch.rand(2, device="cuda"))
    assert torch.equal(torch.cat(parts), torch.cat(drawn(5 + 2718, 3, 5, 2)))
    assert torch.equal(torch.rand(4, device="cuda"), drawn(5, 4, 4)[1])


@GRAPH_SAFE
def test_states_are_megatrons_bytes(seeded):
    torch.cuda.manual_seed(5 + 2718)
    expected = torch.cuda.get_rng_state()
    state = seeded.get_states()["model-parallel-rng"]
    assert torch.equal(random.convert_cuda_rng_state(state), expected)
    again = random.convert_cuda_rng_state(expected, to_graphable=True)
    assert isinstance(again, torch.Generator)
    assert torch.equal(again.get_state(), expected)


@GRAPH_SAFE
def test_states_are_copies_both_ways(seeded, graph_safe):
    kept = seeded.get_states()
    own = seeded.states_["model-parallel-rng"]
    with seeded.fork():
        first = torch.rand(4, device="cuda")
    seeded.set_states(kept)
    for _ in range(2):
        with seeded.fork():
            assert torch.equal(torch.rand(4, device="cuda"), first)
        seeded.set_states(kept)
    if graph_safe:  # the generator that graphs know took the values over
        assert torch.equal(torch.rand(4, generator=own, device="cuda"), first)


@GRAPH_SAFE
def test_draws_on_the_cpu_inside_a_fork_are_reported(seeded, caplog):
    with caplog.at_level(logging.WARNING), seeded.fork():
        torch.rand(1, device="cuda")
    assert not caplog.records
    with caplog.at_level(logging.WARNING), seeded.fork():
        torch.rand(1)
    assert "drawn on the CPU" in caplog.text


def captured(step):
    graph = torch.cuda.CUDAGraph()
    for state in random.get_all_rng_states().values():
        graph.register_generator_state(state)
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize("graph_safe", [True])
def test_a_cuda_graph_goes_on_in_every_replay(seeded):
    out = torch.zeros(3, 4, device="cuda")

    def step():
        with seeded.fork():
            out[0] = torch.rand(4, device="cuda")
            with seeded.fork("expert-parallel-rng"):
                out[1] = torch.rand(4, device="cuda")
        out[2] = torch.rand(4, device="cuda")

    before = seeded.get_states()
    torch.cuda.synchronize()
    graph = captured(step)
    seeds = 5 + 2718, 5 + 1024, 5
    expected = [[torch.stack(row) for row in zip(*(drawn(seed, 4, 4, 4) for seed in seeds), strict=True)]][0]
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(out.clone())
    step()  # and the program goes on where the graph stopped
    replays.append(out.clone())
    for got, wanted in zip(replays, expected, strict=True):
        assert torch.equal(got, wanted)

    seeded.set_states(before)  # what is set is what the graph draws next
    graph.replay()
    assert torch.equal(out[:2], expected[0][:2])


def block(w, x):
    h = torch.tanh(x @ w)
    with random.get_cuda_rng_tracker().fork():
        h = F.dropout(h, 0.3)
    return F.dropout(h @ w.t(), 0.2) + x


def run(recompute, outside, autocast):
    """Three blocks, one after the other as in a transformer, all inside a fork (`outside`) or not."""
    random.model_parallel_cuda_manual_seed(7, use_cudagraphable_rng=random.get_cuda_rng_tracker().use_cudagraphable_rng)
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(64, 64, device="cuda") / 8) for _ in range(3)]
    h = torch.randn(32, 64, device="cuda")
    tracker = random.get_cuda_rng_tracker()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        with tracker.fork() if outside else torch.enable_grad():
            for w in weights:
                if recompute == "checkpoint":
                    h = checkpoint(block, False, w, h)
                elif recompute == "without output":
                    recomputation = CheckpointWithoutOutput()
                    y = recomputation.checkpoint(block, w, h)
                    h = torch.sin(y) * y
                    recomputation.discard_output_and_register_recompute(h)
                    assert y.untyped_storage().nbytes() == 0
                else:
                    h = block(w, h)
                if recompute == "plain product":
                    h = torch.sin(h) * h
    h.float().square().sum().backward()
    with tracker.fork():
        return h.detach(), *(w.grad for w in weights), torch.rand(3, device="cuda"), torch.rand(3)


@GRAPH_SAFE
@pytest.mark.parametrize("outside", [False, True], ids=["", "in a fork"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_recomputation_is_bitwise_the_plain_run(seeded, outside, autocast):
    for plain, recomputed in (("plain", "checkpoint"), ("plain product", "without output")):
        for a, b in zip(run(plain, outside, autocast), run(recomputed, outside, autocast), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("graph_safe", [True])
def test_recomputation_can_be_captured(seeded):
    """States cannot be read while a graph is captured, and are not; the function has no dropout."""
    w = torch.nn.Parameter(torch.randn(16, 16, device="cuda"))
    x = torch.randn(4, 16, device="cuda", requires_grad=True)

    def step():
        with seeded.fork():
            y = checkpoint(lambda x: torch.tanh(x @ w), False, x)
        y.square().sum().backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            w.grad = x.grad = None
            step()
    torch.cuda.current_stream().wait_stream(stream)
    expected = w.grad.clone(), x.grad.clone()
    w.grad = x.grad = None
    graph = captured(step)
    graph.replay()
    torch.testing.assert_close(w.grad, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(x.grad, expected[1], rtol=0, atol=0)


def test_a_tracker_of_the_cpu_leaves_the_gpu_alone():
    torch.cuda.manual_seed(3)
    tracker = CudaRNGStatesTracker(device="cpu")
    tracker.add("a", 1)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(1)))
        assert torch.equal(torch.rand(4, device="cuda"), drawn(3, 4)[0])


def test_without_a_tracker_the_tensors_device_is_restored():
    x = torch.ones(64, device="cuda", requires_grad=True)
    with no_tracker():
        out = checkpoint(lambda x: F.dropout(x, 0.5), False, x)
        out.sum().backward()
    assert torch.equal(x.grad, out)


def test_activations_are_not_kept():
    w = torch.nn.Parameter(torch.randn(1024, 1024, device="cuda") / 32)

    def peak_mib(recompute):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        h = torch.zeros(8192, 1024, device="cuda")

        def function(h):
            for _ in range(4):
                h = torch.tanh(h @ w)
            return h

        for _ in range(6):
            h = checkpoint(function, False, h) if recompute else function(h)
        kept = torch.cuda.memory_allocated() - start
        h.sum().backward()
        return kept / 2**20

    assert peak_mib(False) > 24 * 32
    assert peak_mib(True) <= 7 * 32 + 5
