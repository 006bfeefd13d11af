"""One generator, several streams: who draws what, what is kept, and what is refused."""

import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import random as stock

from megatron_ext.tensor_parallel import random
from megatron_ext.tensor_parallel.random import CudaRNGStatesTracker
from megatron_on_cpu import megatron_on_cpu
from tests.tensor_parallel.sharded import drawn, no_tracker, seeded

GRAPH_SAFE = pytest.mark.parametrize("graph_safe", [False, True], ids=["bytes", "generators"])


def tracker_of(graph_safe=False, **seeds) -> CudaRNGStatesTracker:
    tracker = CudaRNGStatesTracker(use_cudagraphable_rng=graph_safe, device="cpu")
    for name, seed in seeds.items():
        tracker.add(name, seed)
    return tracker


def draw(tracker, count, name="a"):
    with tracker.fork(name):
        return torch.rand(count)


@GRAPH_SAFE
def test_forks_nest_and_a_stream_goes_on_where_it_was(graph_safe):
    tracker = tracker_of(graph_safe, a=1, b=2)
    torch.manual_seed(3)
    a, b, default = [], [], [torch.rand(2)]
    with tracker.fork("a"):
        a.append(torch.rand(2))
        with tracker.fork("b"):
            b.append(torch.rand(3))
            with tracker.fork("a"):
                a.append(torch.rand(4))
                with tracker.fork("a"):
                    a.append(torch.rand(1))
            b.append(torch.rand(2))
        a.append(torch.rand(5))
    default.append(torch.rand(6))
    a.append(draw(tracker, 1))
    assert torch.equal(torch.cat(a), torch.cat(drawn(1, 2, 4, 1, 5, 1)))
    assert torch.equal(torch.cat(b), torch.cat(drawn(2, 3, 2)))
    assert torch.equal(torch.cat(default), torch.cat(drawn(3, 2, 6)))


@GRAPH_SAFE
def test_an_exception_in_a_fork_brings_the_outer_stream_back(graph_safe):
    tracker = tracker_of(graph_safe, a=1)
    torch.manual_seed(3)
    with pytest.raises(KeyError), tracker.fork("a"):
        {}[torch.rand(2)]
    assert torch.equal(torch.rand(4), drawn(3, 4)[0])
    assert torch.equal(draw(tracker, 3), drawn(1, 2, 3)[1])


def test_a_fork_that_fails_leaves_all_streams_alone():
    tracker = tracker_of(a=1)
    torch.manual_seed(3)
    good = tracker.get_states()
    tracker.set_states({"a": good["a"][:8]})
    with pytest.raises(RuntimeError, match="CPUGeneratorImplState"), tracker.fork("a"):
        pass
    tracker.set_states(good)
    assert torch.equal(draw(tracker, 3), drawn(1, 3)[0])
    assert torch.equal(torch.rand(4), drawn(3, 4)[0])


@GRAPH_SAFE
def test_states_are_copies_both_ways(graph_safe):
    tracker = tracker_of(graph_safe, a=1)
    kept = tracker.get_states()
    first = draw(tracker, 5)
    tracker.set_states(kept)
    kept["b"] = kept.pop("a")  # the caller's dict stays the caller's
    assert list(tracker.get_states()) == ["a"]
    assert torch.equal(draw(tracker, 5), first)
    tracker.set_states({"a": kept["b"]})  # and its states were not drawn from
    assert torch.equal(draw(tracker, 5), first)


@GRAPH_SAFE
def test_states_are_taken_in_either_form(graph_safe):
    tracker, other = tracker_of(graph_safe, a=1), tracker_of(not graph_safe, a=2)
    tracker.set_states(other.get_states())
    assert isinstance(tracker.states_["a"], torch.Generator) == graph_safe
    assert torch.equal(draw(tracker, 5), drawn(2, 5)[0])


def test_get_states_sees_the_stream_that_is_in_use():
    tracker = tracker_of(a=1)
    with tracker.fork("a"):
        torch.rand(3)
        state = tracker.get_states()["a"]
    assert torch.equal(state, tracker.get_states()["a"])


def test_states_of_any_type_pass_through():
    tracker = CudaRNGStatesTracker(device="cpu")
    tracker.set_states({"a": 1234})
    assert tracker.is_initialized()
    assert tracker.get_states()["a"] == 1234
    tracker.reset()
    assert not tracker.is_initialized()
    assert tracker.get_states() == {}
    tracker.add("a", 1)
    assert tracker.is_initialized()


def test_reset_inside_a_fork_keeps_the_state_of_the_reset():
    tracker = tracker_of(a=1)
    with tracker.fork("a"):
        tracker.reset()
        torch.manual_seed(9)
    assert torch.equal(torch.rand(3), drawn(9, 3)[0])
    assert tracker.get_states() == {}


def test_what_would_draw_the_same_numbers_twice_is_refused():
    tracker = tracker_of(a=1)
    with pytest.raises(ValueError, match="seed 1 already exists"):
        tracker.add("b", 1)
    with pytest.raises(ValueError, match="name 'a' already exists"):
        tracker.add("a", 2)
    with (
        pytest.raises(ValueError, match=r"'b' is no stream .*\['a'\].*model_parallel_cuda_manual_seed"),
        tracker.fork("b"),
    ):
        pass
    tracker.add("b", 2)  # a refused seed is not taken


def test_add_leaves_the_generator_alone():
    torch.manual_seed(3)
    tracker_of(a=1)
    tracker_of(True, a=1)
    assert torch.equal(torch.rand(3), drawn(3, 3)[0])


def test_the_trackers_options_hold():
    with no_tracker():
        random.initialize_rng_tracker(device="cpu")
        tracker = random.get_cuda_rng_tracker()
        random.initialize_rng_tracker()
        random.initialize_rng_tracker(device="cpu")
        assert random.get_cuda_rng_tracker() is tracker
        for other in ({"use_cudagraphable_rng": True}, {"inference_rng_tracker": True}, {"use_te_rng_tracker": True}):
            with pytest.raises(ValueError, match="force_reset"):
                random.initialize_rng_tracker(**other)
            with pytest.raises(ValueError, match="force_reset"):
                random.get_cuda_rng_tracker(**other)
        with pytest.raises(ValueError, match="force_reset_rng=True"):
            random.model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True)
        assert random.get_cuda_rng_tracker() is tracker

        random.initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True, device="cpu")
        assert random.get_cuda_rng_tracker() is not tracker
        assert random.get_cuda_rng_tracker().use_cudagraphable_rng  # a plain question says nothing about the kind


@GRAPH_SAFE
def test_seeding_by_default_takes_the_tracker_that_there_is(graph_safe):
    """Options that are False ask for no other tracker."""
    with no_tracker():
        random.initialize_rng_tracker(use_cudagraphable_rng=graph_safe, device="cpu")
        tracker = random.get_cuda_rng_tracker()
        for _ in range(2):
            random.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
            assert random.get_cuda_rng_tracker() is tracker
            assert torch.equal(draw(tracker, 4, "model-parallel-rng"), drawn(1 + 2718, 4)[0])


def test_a_tracker_without_streams_does_not_do_for_training():
    with no_tracker():
        random.initialize_rng_tracker(inference_rng_tracker=True, device="cpu")
        for ask in random.initialize_rng_tracker, lambda: random.model_parallel_cuda_manual_seed(1):
            with pytest.raises(ValueError, match=r"'inference_rng_tracker': True.* pass force_reset=True"):
                ask()
        assert random.get_cuda_rng_tracker() is random.get_cuda_rng_tracker(inference_rng_tracker=True)


def test_all_states_are_the_trackers_own():
    with no_tracker():
        with pytest.raises(RuntimeError, match="model_parallel_cuda_manual_seed"):
            random.get_all_rng_states()
        random.model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True, device="cpu")
        states = random.get_all_rng_states()
        assert states is random.get_cuda_rng_tracker().states_
        assert set(states) == {"data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"}
        assert all(isinstance(state, torch.Generator) for state in states.values())
        assert random.is_graph_safe_cuda_rng_tracker(random.get_cuda_rng_tracker())
    with seeded() as tracker:
        assert not random.is_graph_safe_cuda_rng_tracker(tracker)


def test_an_inference_tracker_has_no_streams():
    with seeded(5, inference_rng_tracker=True) as tracker:
        assert tracker.is_inference_rng_tracker
        assert not tracker.is_initialized()
        assert tracker.get_states() == {}
        torch.manual_seed(3)
        with tracker.fork(), tracker.fork("whatever"):
            assert torch.equal(torch.rand(3), drawn(3, 3)[0])


@pytest.mark.parametrize("options", [{}, {"use_cudagraphable_rng": True}], ids=["bytes", "generators"])
def test_all_states_go_out_and_come_back(options):
    with seeded(**options) as tracker:

        def draw():
            with tracker.fork():
                inside = torch.rand(3)
            return torch.cat([inside, torch.rand(3)])

        states = random._get_all_rng_states()
        first = draw()
        with random._fork_rng():
            draw()
        second = draw()
        random._set_all_rng_states(*states)
        assert torch.equal(draw(), first)
        assert torch.equal(draw(), second)


def test_one_generators_state():
    torch.manual_seed(5)
    state, generator = random._get_cuda_rng_state("cpu"), random._get_cuda_rng_state("cpu", clone=True, graph_safe=True)
    assert isinstance(generator, torch.Generator)
    first = torch.rand(4)
    for back in (state, generator):
        random._set_cuda_rng_state(back, "cpu", graph_safe=back is generator)
        assert torch.equal(torch.rand(4), first)
    with pytest.raises(ValueError, match="cuda:99"):
        random._get_cuda_rng_state(99)


def test_states_are_converted_both_ways():
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    assert random.convert_cuda_rng_state(state) is state
    assert random.convert_cuda_rng_state(generator, to_graphable=True) is generator
    assert torch.equal(random.convert_cuda_rng_state(generator), state)
    made = random.convert_cuda_rng_state(state, to_graphable=True)
    assert isinstance(made, torch.Generator)
    assert torch.equal(made.get_state(), state)
    with pytest.raises(ValueError, match="state is a int"):
        random.convert_cuda_rng_state(5)


def test_the_modules_variables_are_live_and_can_be_set():
    with no_tracker():
        assert random._CUDA_RNG_STATE_TRACKER is None
        assert not random._CUDA_RNG_STATE_TRACKER_INITIALIZED
        tracker = random.get_cuda_rng_tracker()
        assert random._CUDA_RNG_STATE_TRACKER is tracker
        assert random._CUDA_RNG_STATE_TRACKER_INITIALIZED
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
        assert random._CUDA_RNG_STATE_TRACKER is None
        random._CUDA_RNG_STATE_TRACKER = tracker
        with mock.patch("megatron_ext.tensor_parallel.random._CUDA_RNG_STATE_TRACKER", None):
            assert random.get_cuda_rng_tracker() is not tracker
        assert random.get_cuda_rng_tracker() is tracker
    for before in (False, True):
        random.IS_CHECKPOINTING = before
        with mock.patch("megatron_ext.tensor_parallel.random.IS_CHECKPOINTING", not before):
            assert random.is_checkpointing() is not before
        assert random.is_checkpointing() is before
    random._unset_checkpointing()
    assert not random.IS_CHECKPOINTING


def test_transformer_engines_tracker_is_missed_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert not random.HAVE_TE
    with no_tracker():
        said = "use_te_rng_tracker=True needs Transformer Engine, which is not installed"
        with pytest.raises(ImportError, match=said):
            random.model_parallel_cuda_manual_seed(1, te_rng_tracker=True)
        assert random._CUDA_RNG_STATE_TRACKER is None


@pytest.mark.parametrize("beside_megatron", [False, True], ids=["alone", "beside Megatron"])
def test_transformer_engines_tracker_is_used_when_asked_for(beside_megatron, monkeypatch):
    class Theirs:
        def __init__(self):
            self.states_, self.seeds_, self.made = {"left over": None}, set(), True

        def reset(self):
            self.states_, self.seeds_ = {}, set()

        def add(self, name, seed):
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed)

        def get_states(self):
            return dict(self.states_)

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].CudaRNGStatesTracker = Theirs
    # Megatron's CUDA graphs look for Megatron's own class; without Transformer Engine there is a mock in its place.
    wrapped = type("TECudaRNGStatesTracker", (Theirs,), {}) if beside_megatron else mock.Mock()
    extension = SimpleNamespace(TECudaRNGStatesTracker=wrapped)
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", extension)
    with no_tracker():
        assert random.HAVE_TE
        random.model_parallel_cuda_manual_seed(7, te_rng_tracker=True, tp_rank=1)
        tracker = random.get_cuda_rng_tracker()
        assert isinstance(tracker, wrapped if beside_megatron else Theirs)
        assert tracker.is_initialized()
        assert tracker.made
        assert tracker.seeds_ == {7, 7 + 2719, 7 + 1024}
        assert random.is_graph_safe_cuda_rng_tracker(tracker)
        assert not tracker.is_inference_rng_tracker
        assert random.get_all_rng_states() is tracker.states_
        moment = tracker.moment()
        drawn_first = torch.rand(3, generator=tracker.states_["model-parallel-rng"]), torch.rand(3)
        tracker.go_to(moment)
        assert torch.equal(torch.rand(3, generator=tracker.states_["model-parallel-rng"]), drawn_first[0])


def test_draws_what_megatrons_tracker_draws(monkeypatch):
    """Any nesting of forks and draws, seeded alike."""

    def program(module, depth, path, out):
        generator = torch.Generator().manual_seed(hash(path) % 2**31)
        for i in range(3):
            length = int(torch.randint(1, 4, (), generator=generator))
            out.append(torch.rand(length, device="cuda"))
            if depth:
                name = module.get_cuda_rng_tracker().get_states()
                name = sorted(name)[int(torch.randint(len(name), (), generator=generator))]
                with module.get_cuda_rng_tracker().fork(name):
                    program(module, depth - 1, (*path, i), out)
        return out

    with megatron_on_cpu(), no_tracker():
        for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
            monkeypatch.setattr(stock, name, None)
        results = []
        for module in (stock, random):
            module.initialize_rng_tracker(force_reset=True)
            module.model_parallel_cuda_manual_seed(11, tp_rank=1, ep_rank=2, etp_rank=1)
            results.append(torch.cat(program(module, 3, (), [])))
            states = module.get_cuda_rng_tracker().get_states()
            results.append(torch.stack([states[name] for name in sorted(states)]))
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
