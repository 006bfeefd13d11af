"""Megatron-Core on our package: everywhere, with the same results, and back without a trace."""

import functools
import gc
import importlib.util
import pkgutil
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ext import restore_tensor_parallel, substitute_tensor_parallel
from megatron_ext.megatron.substitute import _in_use, _instances
from tests.gpt import grouped, model_parallel, ours_everywhere, stock_spec, tiny_batches, tiny_gpt, train_steps
from tests.ranks import TIMEOUT_S, ranks
from tests.tensor_parallel.test_gpt_parity import FULL
from tests.transparent import Transparent


def references():
    """Return the classes and functions that loaded modules of Megatron hold, by module and name."""
    return {
        (name, key): value
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.core") and module is not None
        for key, value in vars(module).items()
        if callable(value)
    }


@ranks(1, 2)
def test_a_model_trains_in_ours_and_everything_is_put_back():
    size = torch.distributed.get_world_size()

    def losses():
        chunks = tiny_gpt(stock_spec, sequence_parallel=size > 1, hidden_dropout=0.1, attention_dropout=0.1, **FULL)
        return torch.tensor(train_steps(chunks, tiny_batches(steps=3)))

    with model_parallel(tp=size):
        stock = losses()
    with model_parallel(tp=size):
        before = references()  # of all modules that a run imports
        with ours_everywhere():
            ours = losses()
        after = references()
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=0)
    changed = [place for place, value in before.items() if after.get(place) is not value]
    assert not changed, changed


@grouped(1)
def test_streams_go_on_where_they_are():
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


@grouped(1)
def test_layer_specs_of_users_hold_ours_meanwhile(monkeypatch):
    """Specs lie in local variables, and in modules, where one may lead back to itself."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    mlp = get_gpt_layer_local_spec().submodules.mlp.submodules
    ring = ModuleSpec(ColumnParallelLinear)
    ring.submodules, user = ring, types.ModuleType("user")
    user.specs = [ring]
    monkeypatch.setitem(sys.modules, "user", user)
    ours = importlib.import_module("megatron_ext.tensor_parallel").ColumnParallelLinear
    assert mlp.linear_fc1 is ring.module is ColumnParallelLinear
    with ours_everywhere():
        assert mlp.linear_fc1 is ring.module is ours
    assert mlp.linear_fc1 is ring.module is ColumnParallelLinear


@grouped(1)
def test_megatrons_layers_are_known_after_imports_among_ours():
    """Modules first imported between substituting and putting back know Megatron's own classes all the same."""
    with ours_everywhere():
        names = ("fused_loss.fusion_decision", "fused_loss.fused_region")
        fusion_decision, fused_region = (_executed_anew(f"megatron_ext.megatron.{name}") for name in names)
    layer = tiny_gpt(stock_spec, num_layers=1)[0].output_layer
    assert type(layer).__module__.startswith("megatron.core")
    assert fusion_decision.why_not_known(layer) is None
    assert isinstance(layer, fused_region._LAYERS["megatron"])


def _executed_anew(name):
    importlib.import_module(name)  # with all that it imports, which would be forgotten below, and imported once more
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {name: module}):  # where its dataclasses look themselves up
        spec.loader.exec_module(module)
    return module


@grouped(1)
def test_refuses_while_megatrons_layers_are_in_use():
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
    with model_parallel():
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


@pytest.mark.slow
def test_modules_imported_before_and_after():
    """Globals, layer specs in globals and in local variables, base classes, default arguments.

    Imports stay imported: what matters before and after one needs an interpreter of its own.
    """
    code = """
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
assert our_specs.gpt_layer_spec.submodules.mlp.submodules.linear_fc1.__mro__[1:] == (
    *ours.ColumnParallelLinear.__mro__[:-2], stock[0], *ours.ColumnParallelLinear.__mro__[-2:])
assert megatron_ext.restore_tensor_parallel() is None
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]


@grouped(1)
@pytest.mark.parametrize(
    "place",
    [
        "tensor_parallel.mappings._reduce",
        "tensor_parallel.layers.RowParallelLinear.forward",
        "tensor_parallel.layers.ColumnParallelLinear",
        "tensor_parallel.cross_entropy.vocab_parallel_cross_entropy",
        "utils.drain_embedding_wgrad_compute",
    ],
)
def test_substitution_refuses_what_users_replaced(place):
    """A decorator that copies names is no Megatron function; ours would stand there without a word."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        path, last = f"megatron.core.{place}".rsplit(".", 1)
        owner = pkgutil.resolve_name(path)
        original = getattr(owner, last)
        own = type(last, (original,), {"forward": lambda *args: None}) if isinstance(original, type) else None
        monkeypatch.setattr(owner, last, own or functools.wraps(original)(lambda *args: original(*args)))
        before = references()
        with pytest.raises(RuntimeError, match=rf"megatron\.core\.{place} \(.*nothing was replaced"):
            substitute_tensor_parallel()
        assert references() == before
        assert restore_tensor_parallel() is None


@grouped(1)
def test_substitution_refuses_code_without_a_file():
    """Code is typed at a prompt, or is behind an object that answers in the name of Megatron's function."""
    typed = {"__name__": "__main__", "own": layers.RowParallelLinear.forward}
    exec("def forward(*args): return own(*args)", typed)
    for forward in (functools.wraps(typed["own"])(typed["forward"]), Transparent(typed["own"])):
        with (
            mock.patch.object(layers.RowParallelLinear, "forward", forward),
            pytest.raises(RuntimeError, match=r"layers\.RowParallelLinear\.forward \(.*nothing was replaced"),
        ):
            substitute_tensor_parallel()


@grouped(1)
def test_substitution_calls_a_replaced_linear_function():
    with pytest.MonkeyPatch.context() as monkeypatch:
        original = layers.linear_with_grad_accumulation_and_async_allreduce
        calls = []

        @functools.wraps(original)
        def counted(*args, **kwargs):
            calls.append(1)
            return original(*args, **kwargs)

        monkeypatch.setattr(layers, original.__name__, counted)
        with ours_everywhere():
            assert layers.linear_with_grad_accumulation_and_async_allreduce is counted
            ours = train_steps(tiny_gpt(stock_spec, num_layers=1), tiny_batches())
        assert len(calls) == 2 * 5  # micro-batches; layers of one transformer layer and the output layer
        assert ours == pytest.approx(train_steps(tiny_gpt(stock_spec, num_layers=1), tiny_batches()), rel=1e-6)
