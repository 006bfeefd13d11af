"""Graph-safe states as CUDA has them, on a stand-in for its generator: what a graph was given goes on being used."""

from contextlib import nullcontext

import pytest
import torch

from megatron_ext.tensor_parallel import random
from megatron_ext.tensor_parallel._random import generator_state, process_tracker, rng_tracker, seeds
from tests.tensor_parallel.sharded import drawn, no_tracker


class Cuda:
    """State of the device: whether a graph is being captured, and its default generator."""

    capturing = False
    default: "SharingGenerator"


class SharingGenerator(torch.Generator):
    """A generator that hands its state out to share, as CUDA's do; it may not be read while a graph is captured."""

    def __new__(cls, device=None):
        return super().__new__(cls)  # there is no CUDA to ask

    def __init__(self, device=None):
        self.state = torch.Generator()  # generators with the same one draw from the same stream

    device = property(lambda self: torch.device("cuda", 0))

    def sharing(self, state):
        other = SharingGenerator()
        other.state = state
        return other

    def _check(self):
        if Cuda.capturing:
            raise RuntimeError("a CUDA graph is being captured")

    def get_state(self):
        self._check()
        return self.state.get_state()

    def set_state(self, value):
        self._check()
        self.state.set_state(value)
        return self

    def manual_seed(self, seed):
        self._check()
        self.state.manual_seed(seed)
        return self

    def clone_state(self):
        self._check()
        return self.sharing(self.state.clone_state())

    def graphsafe_get_state(self):
        return self.sharing(self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state
        return self


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    Cuda.capturing, Cuda.default = False, SharingGenerator()
    for module in (generator_state, rng_tracker, process_tracker, seeds):
        monkeypatch.setattr(module, "generator_of", lambda device=None: Cuda.default)
    monkeypatch.setattr(rng_tracker, "Generator", SharingGenerator)
    monkeypatch.setattr(generator_state, "capturing", lambda generator: Cuda.capturing)
    monkeypatch.setattr(rng_tracker, "capturing", lambda generator: Cuda.capturing)
    monkeypatch.setattr(process_tracker, "capturing", lambda g: Cuda.capturing and isinstance(g, SharingGenerator))
    with no_tracker():
        random.model_parallel_cuda_manual_seed(5, use_cudagraphable_rng=True)
        yield


def rand(count):
    return torch.rand(count, generator=Cuda.default.state)


def test_forks_use_the_registered_states_themselves():
    tracker = random.get_cuda_rng_tracker()
    registered = {name: state.state for name, state in random.get_all_rng_states().items()}
    default = Cuda.default.state
    with tracker.fork():
        assert Cuda.default.state is registered["model-parallel-rng"]
        first = rand(3)
        with tracker.fork("expert-parallel-rng"):
            assert Cuda.default.state is registered["expert-parallel-rng"]
        second = rand(3)
    assert torch.equal(torch.cat([first, second]), torch.cat(drawn(5 + 2718, 3, 3)))
    assert Cuda.default.state is default
    assert {name: state.state for name, state in random.get_all_rng_states().items()} == registered


def test_values_are_set_in_the_registered_states():
    tracker = random.get_cuda_rng_tracker()
    registered = {name: state.state for name, state in tracker.states_.items()}
    kept = tracker.get_states()
    assert not {id(state.state) for state in kept.values()} & {id(state) for state in registered.values()}
    with tracker.fork():
        first = rand(3)
    tracker.set_states(kept)
    assert {name: state.state for name, state in tracker.states_.items()} == registered
    with tracker.fork():
        assert torch.equal(rand(3), first)
    tracker.set_states({name: state.get_state() for name, state in kept.items()})  # as read from a checkpoint file
    assert {name: state.state for name, state in tracker.states_.items()} == registered
    with tracker.fork():
        assert torch.equal(rand(3), first)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in a fork"])
def test_a_moment_comes_again_in_the_same_states(inside):
    tracker = random.get_cuda_rng_tracker()
    default = Cuda.default.state

    def draw():
        with tracker.fork("expert-parallel-rng"):
            expert = rand(2)
        with tracker.fork():
            own = rand(2)
        return torch.cat([expert, own, rand(2)])

    with tracker.fork() if inside else nullcontext():
        moment = process_tracker.RandomMoment()
        first = draw()
    states = {name: state.state for name, state in tracker.states_.items()}
    before = {name: state.get_state() for name, state in tracker.states_.items()}
    with moment.again():
        assert (Cuda.default.state is default) != inside
        assert torch.equal(draw(), first)
    assert Cuda.default.state is default
    for name, state in tracker.states_.items():
        assert state.state is states[name]
        assert torch.equal(state.get_state(), before[name]), name


def test_nothing_is_read_while_a_graph_is_captured():
    tracker = random.get_cuda_rng_tracker()
    x = torch.ones(3, requires_grad=True)
    Cuda.capturing = True
    with tracker.fork():
        out = random.checkpoint(torch.sin, False, x)
        states = random._get_all_rng_states()
    out.sum().backward()
    assert states[1].state is tracker.states_["model-parallel-rng"].state
    assert tracker.get_states()["model-parallel-rng"].state is tracker.states_["model-parallel-rng"].state
    random._set_all_rng_states(*states)
    Cuda.capturing = False
    assert torch.equal(x.grad, x.cos())
    assert Cuda.default.state is states[1].state
