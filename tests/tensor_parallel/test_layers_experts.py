"""Layers of experts: whole or cut, and what they leave to the token dispatcher."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from megatron_ext.distributed.counting import count_collectives
from tests.gpt import grouped, model_parallel, tiny_config
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, build, numbers
from tests.tensor_parallel.test_layers import D, N, S, init


def expert_layers(config, **options):
    shared = {"config": config, "init_method": init, "is_expert": True, "bias": False}
    return build("column", D, N, **shared), build("row", N, D, **{**shared, "skip_bias_add": True, **options})


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sharded_experts_leave_communication_to_the_dispatcher(sequence_parallel):
    with model_parallel(tp=2, expert_tensor_parallel_size=2):
        config = Config(sequence_parallel=sequence_parallel)
        up, down = expert_layers(config, bias=True, skip_bias_add=False)
        with torch.no_grad():
            down.bias.copy_(numbers(D, seed=5))
        x, dy = numbers(S, D, seed=1).requires_grad_(), numbers(S, D, seed=2)
        with count_collectives() as counts:
            y, _ = down(torch.tanh(up(x)[0]))
            y.backward(dy)
        assert not counts
        dist.all_reduce(y := y.detach())
        dist.all_reduce(x.grad)
    whole_x = x.detach().clone().requires_grad_()
    w_up, w_down, bias = numbers(N, D, seed=7), numbers(D, N, seed=7), numbers(D, seed=5).requires_grad_()
    whole = F.linear(torch.tanh(F.linear(whole_x, w_up)), w_down, bias)
    whole.backward(dy)
    torch.testing.assert_close(y, whole.detach(), rtol=1e-5, atol=1e-4)  # the bias once, not once a rank
    torch.testing.assert_close(x.grad, whole_x.grad, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(down.bias.grad, bias.grad)
    assert not down.bias.sequence_parallel  # else Megatron would add up what is whole on every rank
    assert up.explicit_expert_comm
    assert up.weight.allreduce is True  # no expert parallelism


@grouped(2, tp=2, ep=2, expert_tensor_parallel_size=1)
def test_experts_of_expert_parallelism():
    up, down = expert_layers(Config(expert_model_parallel_size=2), bias=True)
    assert up.weight.shape == (N, D)
    assert [p.allreduce for layer in (up, down) for p in layer.parameters()] == [False] * 3
    dense = build("column", D, N, config=Config(expert_model_parallel_size=2))
    assert dense.weight.shape == (N // 2, D)
    assert dense.weight.allreduce is True
    assert not dense.explicit_expert_comm
    x = torch.randn(S, D, requires_grad=True)
    with count_collectives() as counts:
        y, bias = down(up(x)[0])
        y.sum().backward()
    assert not counts
    assert bias is down.bias


@grouped(1, tp=1, ep=1)
def test_expert_row_without_bias_needs_no_skip_bias_add():
    _, down = expert_layers(Config(expert_model_parallel_size=2), skip_bias_add=False)
    x = numbers(S, N, seed=1)
    torch.testing.assert_close(down(x)[0], F.linear(x, down.weight))


@grouped(2, tp=2, expert_tensor_parallel_size=1)
def test_experts_cut_otherwise_have_a_dp_group_of_their_own():
    config = tiny_config(expert_tensor_parallel_size=1, sequence_parallel=True)
    experts = torch.nn.ModuleList(expert_layers(config, bias=True, skip_bias_add=False))
    assert [p.allreduce for p in experts.parameters()] == [False] * 3
    assert build("column", D, N, config=config).weight.allreduce is True
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), experts)
    up, down = experts
    x = [numbers(S, D, seed=rank) for rank in range(2)]
    down(up(x[dist.get_rank()])[0])[0].sum().backward()
    finalize_model_grads([model])
    weights = [numbers(N, D, seed=7).requires_grad_(), numbers(D, N, seed=7).requires_grad_()]
    sum(F.linear(F.linear(own, weights[0]), weights[1]).sum() for own in x).backward()
    for layer, weight in zip((up, down), weights, strict=True):
        torch.testing.assert_close(layer.weight.main_grad, weight.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(down.bias.main_grad, torch.full((D,), 2.0 * S))  # not added up once more


@grouped(2, tp=2, ep=2, expert_tensor_parallel_size=1)
def test_biases_of_other_experts_are_not_added_up():
    """Megatron sums gradients of parameters with this mark over the dense layers' tensor-parallel ranks."""
    config = Config(expert_model_parallel_size=2, sequence_parallel=True)
    assert not expert_layers(config, bias=True)[1].bias.sequence_parallel
    assert build("row", N, D, config=config).bias.sequence_parallel
