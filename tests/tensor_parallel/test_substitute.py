"""Megatron-Core on our package: everywhere, with the same results, and back without a trace."""

import gc
import importlib
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType
from unittest import mock

import pytest
import torch

from megatron_ext.emulation import megatron_on_cpu
from tests.gpt import model_parallel, ours_everywhere, stock_spec, tiny_batches, tiny_gpt, train_steps
from tests.ranks import TIMEOUT_S, ranks
from tests.tensor_parallel.rng import drawn, no_tracker

LAYERS = {"ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"}


def references():
    """What every loaded module of Megatron holds under each name that is a class or a function."""
    return {
        (name, key): value
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.core") and module is not None
        for key, value in vars(module).items()
        if callable(value)
    }


def losses(substituted, **overrides):
    with ours_everywhere() if substituted else nullcontext():
        chunks = tiny_gpt(stock_spec, hidden_dropout=0.1, attention_dropout=0.1, **overrides)
        layers = {type(m) for m in chunks[0].modules() if type(m).__name__ in LAYERS}
        homes = {layer.__module__.split(".")[0] for layer in layers}
        assert homes == {"megatron_ext" if substituted else "megatron"}
        assert {layer.__name__ for layer in layers} == LAYERS
        return train_steps(chunks, tiny_batches(steps=3))


@ranks(1, 2)
def test_a_stock_model_trains_alike_and_everything_is_put_back():
    size = torch.distributed.get_world_size()
    overrides = {"sequence_parallel": size > 1, "recompute_granularity": "full",
                 "recompute_method": "uniform", "recompute_num_layers": 1}  # fmt: skip
    with model_parallel(tp=size):
        stock = losses(False, **overrides)
    with model_parallel(tp=size):
        before = references()  # in the same emulation, which has functions of its own
        ours = losses(True, **overrides)
        after = references()
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=1e-6, atol=0)
    changed = [place for place, value in before.items() if after.get(place) is not value]
    assert not changed, changed


@ranks(1)
def test_streams_go_on_where_they_are():

    with model_parallel():
        from megatron.core import tensor_parallel

        def draw():
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return torch.rand(4, device="cuda")

        tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        expected = [draw() for _ in range(3)]
        tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        got = [draw()]
        with ours_everywhere():
            got.append(draw())
        got.append(draw())
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


@ranks(1)
def test_refuses_while_megatrons_layers_are_in_use():
    from megatron_ext import restore_tensor_parallel, substitute_tensor_parallel

    with model_parallel():
        chunks = tiny_gpt(stock_spec, num_layers=1)
        before = references()
        with pytest.raises(RuntimeError, match=r"layers are in use \(.* RowParallelLinear.*nothing was replaced"):
            substitute_tensor_parallel()
        assert references() == before
        assert restore_tensor_parallel() is None
        assert all(type(m).__module__.startswith("megatron.") for m in chunks[0].modules() if "Linear" in str(type(m)))


@pytest.mark.slow
@ranks(1)
def test_models_that_cannot_run_again_are_not_in_use():
    """Gone but for Megatron's hooks, which keep their memory; or there, but without the groups that they ran on."""
    from megatron_ext.megatron.substitute import _in_use, _instances

    with model_parallel():
        from megatron.core.tensor_parallel import layers

        stock = layers.ColumnParallelLinear, layers.RowParallelLinear
        chunks = tiny_gpt(stock_spec, num_layers=1)
        train_steps(chunks, tiny_batches(steps=1))
        del chunks
        gc.collect()
        assert _instances(stock)
        assert not _in_use(stock)
        chunks = tiny_gpt(stock_spec, num_layers=1)
    walk = mock.patch("gc.get_referents", side_effect=AssertionError("a walk through all objects"))
    with model_parallel(), walk, ours_everywhere():
        pass
    assert chunks


def in_a_new_process(code):
    """Imports stay imported: what matters before and after an import needs an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_modules_imported_before_and_after():
    """Globals, layer specs in globals and in local variables, base classes, default arguments."""
    in_a_new_process(
        """
import sys, types
import megatron.core.tensor_parallel as tp
from megatron.core.tensor_parallel import layers
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from megatron.core.distributed import TorchFullyShardedDataParallel
import megatron_ext, megatron_ext.tensor_parallel as ours

Stock = tp.ColumnParallelLinear
stock = (tp.ColumnParallelLinear,)  # out of reach
local = get_gpt_layer_local_spec()

def holders():
    return [
        tp.ColumnParallelLinear,
        layers.ColumnParallelLinear,
        sys.modules["megatron.core.models.backends"].ColumnParallelLinear,
        bert_layer_local_spec.submodules.mlp.submodules.linear_fc1,
        local.submodules.mlp.submodules.linear_fc1,
        get_gpt_layer_local_spec().submodules.mlp.submodules.linear_fc1,
        ColumnParallelLinearGathered.__bases__[0],
        [c for d in TorchFullyShardedDataParallel.__init__.__defaults__ if isinstance(d, set) for c in d
         if c.__name__ == "ColumnParallelLinear"][0],
        Stock,
    ]

assert all(h is stock[0] for h in holders())
report = megatron_ext.substitute_tensor_parallel()
assert "megatron_ext stands in for" in str(report), report
assert "layers.ColumnParallelLinear" in report.names
assert "megatron.core.models.backends.ColumnParallelLinear" in report.places
assert megatron_ext.substitute_tensor_parallel() is report
assert all(h is ours.ColumnParallelLinear for h in holders()), holders()

assert "megatron.core.models.T5.t5_spec" not in sys.modules
from megatron.core.models.T5 import t5_spec
from megatron.core.pipeline_parallel import schedules
assert schedules.drain_embedding_wgrad_compute is ours.layers.drain_embedding_wgrad_compute
user = types.ModuleType("user")
exec("from megatron.core.tensor_parallel.mappings import _reduce", vars(user))
sys.modules["user"] = user
assert t5_spec.ColumnParallelLinear is ours.ColumnParallelLinear
assert user._reduce is ours.mappings._reduce
import megatron_ext.megatron.layer_specs as our_specs

assert megatron_ext.restore_tensor_parallel() is report
assert all(h is stock[0] for h in holders()), holders()
assert t5_spec.ColumnParallelLinear is stock[0]
assert schedules.drain_embedding_wgrad_compute.__module__ == "megatron.core.utils"
assert user._reduce is tp.mappings._reduce
assert tp.mappings._reduce.__module__ == "megatron.core.tensor_parallel.mappings"
assert ours.ColumnParallelLinear.__module__.startswith("megatron_ext.")
assert our_specs.gpt_layer_spec.submodules.mlp.submodules.linear_fc1 is ours.ColumnParallelLinear
assert megatron_ext.restore_tensor_parallel() is None
"""
    )


@pytest.mark.slow
def test_lives_with_torch_alone_until_it_is_asked_for():
    in_a_new_process(
        """
import sys, megatron_ext
assert not any(name.startswith("megatron.") for name in sys.modules)
assert "substitute_tensor_parallel" in megatron_ext.__all__
"""
    )
    with pytest.raises(AttributeError, match="module 'megatron_ext' has no attribute 'nothing'"):
        importlib.import_module("megatron_ext").nothing  # noqa: B018


@pytest.fixture
def engine(monkeypatch):
    """Transformer Engine's RNG tracker, and Megatron's class around it, over the CPU's generator."""

    class Tracker:
        def __init__(self):
            self.reset()

        def reset(self):
            self.states_, self.seeds_ = {}, set()

        def get_states(self):
            return dict(self.states_)

        def set_states(self, states):
            self.states_ = states

        def add(self, name, seed):
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextmanager
        def fork(self, name="model-parallel-rng"):
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    class TECudaRNGStatesTracker(Tracker):
        is_inference_rng_tracker = False

        def __init__(self, is_inference_rng_tracker=False):
            super().__init__()

        def is_initialized(self):
            return bool(self.states_)

    # Megatron, and what of it ours need, is imported without the stand-ins.
    megatrons = importlib.import_module("megatron.core.extensions.transformer_engine")
    importlib.import_module("megatron_ext.megatron.substitute")
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["transformer_engine.pytorch.distributed"].CudaRNGStatesTracker = Tracker
    monkeypatch.setattr(megatrons, "TECudaRNGStatesTracker", TECudaRNGStatesTracker, raising=False)
    return TECudaRNGStatesTracker


def test_the_tracker_of_transformer_engine_goes_on_in_ours_and_stays_megatrons(engine, monkeypatch):

    with megatron_on_cpu(), no_tracker():
        from megatron.core import tensor_parallel
        from megatron.core.tensor_parallel import random as theirs

        def draw(x):
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return x * torch.rand(4)

        tracker = engine()
        tracker.add("model-parallel-rng", 5)
        monkeypatch.setattr(theirs, "_CUDA_RNG_STATE_TRACKER", tracker)
        monkeypatch.setattr(theirs, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
        expected = drawn(5, 4, 4, 4)
        one = torch.ones(4, requires_grad=True)
        got = [draw(one)]
        with ours_everywhere():
            assert isinstance(tensor_parallel.get_cuda_rng_tracker(), engine)
            got.append(tensor_parallel.checkpoint(draw, False, one))
            got[-1].sum().backward()
        assert theirs._CUDA_RNG_STATE_TRACKER is tracker
        got.append(draw(one))
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), rtol=0, atol=0)
    assert torch.equal(one.grad, expected[1])


def test_a_tracker_of_transformer_engine_that_was_made_in_ours_is_one_in_megatrons(engine, monkeypatch):

    with megatron_on_cpu(), no_tracker():
        from megatron.core import tensor_parallel
        from megatron.core.tensor_parallel import random as theirs

        monkeypatch.setattr(theirs, "_CUDA_RNG_STATE_TRACKER", None)
        monkeypatch.setattr(theirs, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
        monkeypatch.setattr(theirs, "HAVE_TE", True)
        monkeypatch.setattr(theirs, "is_te_min_version", lambda *args: True, raising=False)
        with ours_everywhere():
            tensor_parallel.get_cuda_rng_tracker(use_te_rng_tracker=True).add("model-parallel-rng", 5)
        found = tensor_parallel.get_cuda_rng_tracker()
        assert type(found) is engine
        with found.fork():
            assert torch.equal(torch.rand(4), drawn(5, 4)[0])
