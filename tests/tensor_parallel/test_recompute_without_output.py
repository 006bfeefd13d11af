"""CheckpointWithoutOutput: the output's memory is given back, and the numbers are those of the plain run."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from megatron_ext.tensor_parallel import random
from megatron_ext.tensor_parallel.random import CheckpointWithoutOutput, checkpoint
from tests.ranks import ranks
from tests.tensor_parallel.sharded import numbers
from tests.tensor_parallel.test_recompute import Block, assert_as_without, assert_bitwise_as_without


def bytes_of(tensor) -> int:
    return tensor.untyped_storage().nbytes()


def used(recompute, function, use, *args, **kwargs):
    """`use(function(*args))`. With `recompute` what the function returns is freed then, until the backward."""
    if not recompute:
        return use(function(*args, **kwargs))
    recomputation = CheckpointWithoutOutput()
    results = recomputation.checkpoint(function, *args, **kwargs)
    out = use(results)
    recomputation.discard_output_and_register_recompute(out)
    assert not any(bytes_of(x) for x in tree_leaves(results) if isinstance(x, torch.Tensor))
    return out


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
@ranks(1, 2, 4)
def test_bitwise_as_without_with_dropout_and_forks(sequence_parallel):
    norms = torch.nn.ParameterList(numbers(8, seed=10 + i) for i in range(3))
    blocks = torch.nn.ModuleList(Block(sequence_parallel) for _ in range(3))

    def norm(weight, x):
        with random.get_cuda_rng_tracker().fork():
            return F.dropout(F.layer_norm(x, (8,)) * weight, 0.2)

    def stack(recompute, hidden):
        for weight, block in zip(norms, blocks, strict=True):
            hidden = used(recompute, norm, lambda x, h=hidden, mlp=block: h + mlp(x), weight, hidden)
        return hidden

    assert_bitwise_as_without(stack, torch.nn.ModuleList([norms, blocks]), sequence_parallel)


def gelu_times(x, recompute):
    """Multiply gelu(x) by x as a user does: the product saves the activation's output, emptied until the backward."""
    return used(recompute, F.gelu, lambda activated: activated * x, x)


def test_again_and_again():
    x = numbers(4, 4, seed=0).requires_grad_()

    def twice(recompute):
        out = gelu_times(x, recompute)
        out.sum().backward(retain_graph=True)
        return out

    assert_as_without(twice, x)

    recomputation = CheckpointWithoutOutput()

    def chain(recompute):
        hidden = x
        for _ in range(3):
            activated = recomputation.checkpoint(F.gelu, hidden) if recompute else F.gelu(hidden)
            hidden = activated * activated
            if recompute:
                recomputation.discard_output_and_register_recompute(hidden)
        return hidden

    assert_as_without(chain, x)


def test_aliases_of_inputs_are_not_freed():
    x = numbers(4, 6, seed=0).requires_grad_()
    y = x * 1
    kept = y.detach().clone()

    def function(y):
        return y, y.view(-1), y.t(), y.sin()

    recomputation = CheckpointWithoutOutput()
    same, view, transposed, sine = recomputation.checkpoint(function, y)
    out = (same * sine).sum() + (view * view).sum() + transposed.exp().sum()
    recomputation.discard_output_and_register_recompute(out)
    assert torch.equal(y, kept)
    assert torch.equal(view, kept.view(-1))
    assert bytes_of(sine) == 0
    out.backward()
    grad, x.grad = x.grad, None
    same, view, transposed, sine = function(x * 1)
    ((same * sine).sum() + (view * view).sum() + transposed.exp().sum()).backward()
    assert torch.allclose(grad, x.grad, rtol=1e-6)  # the sums over the uses of x are in another order


def test_outputs_in_one_storage_and_containers():
    x, scale = numbers(4, 6, seed=0).requires_grad_(), numbers(2, seed=1).requires_grad_()

    def function(x, *, scale):
        low, high = F.dropout(x, 0.3).sin().chunk(2, dim=1)
        return {"low": low * scale[0] if scale is None else low, "high": (high, "text"), "scaled": high * scale[0]}

    def use(parts):
        assert parts["high"][1] == "text"
        return parts["low"] * parts["high"][0] * parts["scaled"]

    def run(recompute):
        return used(recompute, function, use, x, scale=scale)

    assert_as_without(run, x, scale)


def test_a_hook_tensor_in_the_outputs_memory_keeps_it():
    x = numbers(4, 6, seed=0).requires_grad_()
    recomputation = CheckpointWithoutOutput()
    out = recomputation.checkpoint(torch.sin, x)
    recomputation.discard_output_and_register_recompute(out)
    assert torch.equal(out, x.sin())
    out.sum().backward()
    assert torch.equal(x.grad, x.cos())


def test_only_parameters_need_gradients():
    norm, x = torch.nn.LayerNorm(6), numbers(4, 6, seed=0)

    def use(normed):
        assert normed.requires_grad
        return normed * normed

    assert_as_without(lambda recompute: used(recompute, norm, use, x), norm.weight, norm.bias)


def test_what_cannot_come_back_is_not_freed():
    """A frozen function before a trained one: nobody keeps its recomputation, so its output stays."""
    x, weight = numbers(4, 6, seed=0), torch.nn.Parameter(numbers(6, seed=1))
    recomputation = CheckpointWithoutOutput()
    frozen = recomputation.checkpoint(torch.sin, x)
    out = frozen * weight
    recomputation.discard_output_and_register_recompute(out)
    out.sum().backward()
    assert torch.equal(weight.grad, x.sin().sum(0))

    recomputation = CheckpointWithoutOutput()
    trained = recomputation.checkpoint(torch.sin, x.requires_grad_())
    recomputation.discard_output_and_register_recompute(trained.detach() * 2)
    (trained * trained).sum().backward()
    assert torch.allclose(x.grad, (2 * x).sin(), atol=1e-6)


def test_without_gradients_the_output_is_freed_for_good():
    x = numbers(4, 6, seed=0)
    recomputation = CheckpointWithoutOutput()
    with torch.no_grad():
        activated = recomputation.checkpoint(torch.sin, x)
        out = activated * 2
        recomputation.discard_output_and_register_recompute(out)
    assert bytes_of(activated) == 0
    assert torch.equal(out, x.sin() * 2)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_inside_a_checkpoint(frozen):
    x, weight = numbers(4, 4, seed=0).requires_grad_(not frozen), torch.nn.Parameter(numbers(4, 4, seed=1))

    def function(x, recompute):
        return F.dropout(gelu_times(x @ weight, recompute), 0.5)

    def run(recompute):
        return checkpoint(function, False, x, recompute) if recompute else function(x, False)

    assert_as_without(run, *([] if frozen else [x]), weight)
    assert not random.is_checkpointing()


def test_exceptions_leave_nothing_behind():
    x, broken = numbers(3, seed=0).requires_grad_(), []

    def function(x):
        if broken:
            raise KeyError
        return x.sin()

    recomputation = CheckpointWithoutOutput()
    with pytest.raises(RuntimeError, match="call checkpoint"):
        recomputation.discard_output_and_register_recompute(x)
    y = recomputation.checkpoint(function, x)
    out = y * y
    recomputation.discard_output_and_register_recompute(out)
    broken.append(True)
    with pytest.raises(KeyError):
        out.sum().backward(retain_graph=True)
    assert not random.is_checkpointing()
    with pytest.raises(KeyError):
        CheckpointWithoutOutput().checkpoint(function, x)
    assert not random.is_checkpointing()
    broken.clear()
    with pytest.raises(RuntimeError, match="torch.autograd.grad"):
        torch.autograd.grad(out.sum(), x, retain_graph=True)
    out.sum().backward()
    assert torch.equal(x.grad, 2 * x.sin() * x.cos())


@pytest.mark.parametrize("off", [False, None])
def test_fp8_that_is_off_needs_no_transformer_engine(off, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert CheckpointWithoutOutput(fp8=off).fp8 is False
    x = numbers(3, seed=0).requires_grad_()
    CheckpointWithoutOutput(off).checkpoint(torch.sin, x).sum().backward()
    assert torch.equal(x.grad, x.cos())
    with pytest.raises(ImportError, match="fp8 needs Transformer Engine, which is not installed"):
        CheckpointWithoutOutput(fp8="hybrid").checkpoint(torch.sin, x)
    assert not random.is_checkpointing()


def test_fp8_settings_of_the_forward_hold_in_the_recomputation(monkeypatch):
    log = []

    @contextmanager
    def activation_recompute_forward(activation_recompute, recompute_phase):
        log.append(("phase", activation_recompute, recompute_phase))
        yield

    @contextmanager
    def fp8_autocast(enabled, fp8_recipe, fp8_group):
        log.append(("fp8", enabled, fp8_recipe, fp8_group))
        yield

    manager = SimpleNamespace(is_fp8_enabled=lambda: True, get_fp8_recipe=lambda: "delayed", get_fp8_group=lambda: "dp")
    for name, contents in (
        ("transformer_engine", {}),
        ("transformer_engine.pytorch", {}),
        (
            "transformer_engine.pytorch.distributed",
            {"activation_recompute_forward": activation_recompute_forward, "CudaRNGStatesTracker": int},
        ),
        ("transformer_engine.pytorch.fp8", {"fp8_autocast": fp8_autocast, "FP8GlobalStateManager": manager}),
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(contents)
    x = numbers(3, seed=0).requires_grad_()
    recomputation = CheckpointWithoutOutput(fp8="hybrid")
    y = recomputation.checkpoint(lambda x: log.append("run") or x.sin(), x)
    out = y * y
    recomputation.discard_output_and_register_recompute(out)
    assert log == [("phase", True, False), "run"]
    out.sum().backward()
    assert log[2:] == [("fp8", True, "delayed", "dp"), ("phase", True, True), "run"]


def test_warm_up_for_a_cuda_graph_recomputes_nothing(monkeypatch):
    """Megatron's CUDA graphs warm a layer up piece by piece; the discarding piece may never see its backward."""
    graphs = SimpleNamespace(is_graph_warmup=lambda: True, is_graph_capturing=lambda: False)
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.cuda_graphs", graphs)
    x = numbers(3, seed=0).requires_grad_()
    recomputation = CheckpointWithoutOutput()
    y = recomputation.checkpoint(torch.sin, x)
    recomputation.discard_output_and_register_recompute(y * y)
    assert torch.equal(y, x.sin())
    assert "Checkpoint" not in str(y.grad_fn)
