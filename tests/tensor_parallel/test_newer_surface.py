"""Arguments that Megatron-Core 0.17 to 0.20 pass to the layers and functions, under whatever version is installed."""

import importlib
import sys
import types

import pytest
import torch
import torch.distributed as dist

from megatron_ext import tensor_parallel as tp
from megatron_ext.tensor_parallel import inference_layers, random
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, alone, drawn, no_tracker
from tests.tensor_parallel.test_recompute import assert_as_without

WHOLE = {
    "config": Config(),
    "init_method": torch.nn.init.normal_,
    "bias": True,
    "skip_bias_add": False,
    "skip_weight_param_allocation": False,
    "is_expert": False,
}


def test_a_layer_with_all_the_weight_for_decoding():
    layer = inference_layers.InferenceLinear(4, 3, parallel_mode="duplicated", **WHOLE, name="down")
    x = torch.randn(2, 4, requires_grad=True)
    torch.nn.init.normal_(layer.bias)
    out, bias = layer(x)
    torch.testing.assert_close(out, x @ layer.weight.T + layer.bias)
    out.sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.detach().sum(0).expand(3, 4))
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(2, 4))
    assert bias is None
    layer.eval()
    assert not layer(x)[0].requires_grad
    for wrong in ({"parallel_mode": "column"}, {"is_expert": True}, {"skip_weight_param_allocation": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            inference_layers.InferenceLinear(4, 3, **{"parallel_mode": None} | WHOLE | wrong)


@ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_column_parallel_layer_and_regions_of_decoding(sequence):
    group = dist.group.WORLD
    rank = dist.get_rank()
    config = Config(sequence_parallel=sequence)
    layer = tp.InferenceColumnParallelLinear(6, 4, config=config, init_method=torch.nn.init.normal_, tp_group=group)
    assert inference_layers.is_inference_column_parallel_linear(layer)
    assert not inference_layers.is_inference_column_parallel_linear(None)
    layer.set_barrier_before_all_gather()
    assert layer.barrier_before_all_gather
    full = torch.arange(24.0).view(4, 6)
    x = full.chunk(2)[rank] if sequence else full
    for training in (True, False):
        layer.train(training)
        out, _ = layer(x)
        torch.testing.assert_close(out, full @ layer.weight.T)
        assert out.requires_grad == training
    gathered = inference_layers.inference_all_gather_from_tensor_model_parallel_region(out, group, config, True)
    torch.testing.assert_close(gathered, tp.gather_from_tensor_model_parallel_region(out, group))
    mine = inference_layers.inference_reduce_scatter_to_sequence_parallel_region(full * (1 + rank), group, config)
    torch.testing.assert_close(mine, 3 * full.chunk(2)[rank])


@ranks(2)
def test_all_to_all_on_another_stream_is_the_same():
    x = torch.arange(4.0).view(4, 1).add(10 * dist.get_rank()).requires_grad_()
    plain, other = (tp.all_to_all(dist.group.WORLD, x, use_nccl_stream=use) for use in (False, True))
    assert torch.equal(plain, other)
    (g,) = torch.autograd.grad(other, x, torch.ones_like(other))
    assert torch.equal(g, torch.ones_like(x))


@ranks(2)
def test_who_counts_a_parameter():
    one, both = alone(), dist.group.WORLD
    weight, expert = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    expert.allreduce = False
    first = dist.get_rank() == 0
    assert tp.param_is_not_tensor_parallel_duplicate(weight, both, one) == first
    assert tp.param_is_not_tensor_parallel_duplicate(expert, both, one)
    assert tp.param_is_not_tensor_parallel_duplicate(expert, one, both) == first
    assert tp.param_is_not_gtp_duplicate(weight)  # no generalized tensor parallelism
    state = types.SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_gtp_weight_remat_group=lambda check_initialized: both,
        get_expert_gtp_weight_remat_group=lambda check_initialized: one,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.core.parallel_state", state)
        assert tp.param_is_not_gtp_duplicate(weight) == first
        assert tp.param_is_not_gtp_duplicate(expert)
        weight.is_gtp_weight_remat = True
        assert tp.param_is_not_gtp_duplicate(weight)
    copy = torch.ones(1)
    tp.copy_gtp_attributes(copy, weight)
    assert copy.is_gtp_weight_remat
    assert not hasattr(copy, "allreduce")


@no_tracker()
def test_streams_of_generalized_tensor_parallelism():
    """Seeds as Megatron-Core 0.20 gives them: 65536 apart, the experts' half a step further on."""
    places = {"tp_rank": 1, "ep_rank": 2, "etp_rank": 0}
    random.initialize_rng_tracker(force_reset=True)
    random.model_parallel_cuda_manual_seed(7, **places, gtp_remat_rank=1, gtp_remat_world_size=2)
    tracker = random.get_cuda_rng_tracker()
    assert random.get_gtp_remat_rng_tracker_name() in tracker.get_states()
    assert random.get_gtp_remat_rng_tracker_name(is_expert=True) not in tracker.get_states()
    with tracker.fork(random.get_gtp_remat_rng_tracker_name()):
        assert torch.equal(torch.rand(3), drawn(7 + 2718 + 1 + 2 * 65536, 3)[0])
    random.model_parallel_cuda_manual_seed(7, **places, egtp_remat_rank=0, egtp_remat_world_size=2)
    with tracker.fork(random.get_gtp_remat_rng_tracker_name(is_expert=True)):
        assert torch.equal(torch.rand(3), drawn(7 + 1024 + 200 + 32768 + 65536, 3)[0])
    random.model_parallel_cuda_manual_seed(7, **places)
    assert random.get_gtp_remat_rng_tracker_name() not in tracker.get_states()


def test_outputs_of_a_chain_are_recomputed_together():
    manager = random.CheckpointWithoutOutputManager()
    with pytest.raises(ValueError, match="call its checkpoint"):
        manager.add_checkpoint(random.CheckpointWithoutOutput())
    with pytest.raises(TypeError, match="ckpt is a int"):
        manager.add_checkpoint(3)
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
    calls = []

    def first(t):
        calls.append("first")
        return torch.tanh(t @ weight)

    def second(t):
        calls.append("second")
        return t.sin()

    def run(recompute):
        if not recompute:
            return second(first(x)).square().matmul(weight)
        one = random.CheckpointWithoutOutput(ckpt_manager=manager, retain_input_tensors=True)
        two = random.CheckpointWithoutOutput(ckpt_manager=manager)
        a = one.checkpoint(first, x)
        b = two.checkpoint(second, a)
        out = b.square().matmul(weight)
        one.discard_output_and_register_recompute(out)  # the manager does
        assert a.untyped_storage().nbytes() > 0
        manager.discard_all_outputs_and_register_unified_recompute(out)
        assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes() == 0
        assert manager.checkpoints == []
        return out

    assert_as_without(run, x, weight)
    assert calls == ["first", "second"] * 3


def test_generalized_tensor_parallelism_is_megatrons_own():
    ours = importlib.import_module("megatron_ext.tensor_parallel.gtp_api")
    try:
        theirs = importlib.import_module("megatron.core.tensor_parallel.gtp_api")
    except ImportError:
        assert ours.HAVE_GTP is False
        with pytest.raises(AttributeError, match=r"has no is_gtp_param: .*it came with 0\.19"):
            ours.is_gtp_param  # noqa: B018
        return
    assert ours.HAVE_GTP is theirs.HAVE_GTP
    assert ours.is_gtp_param is theirs.is_gtp_param
