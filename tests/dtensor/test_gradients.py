import copy
import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megatron_ext.dtensor import clip_grad_by_total_norm_, get_grad_norm, to_local_if_dtensor
from megatron_ext.dtensor.experts import ExpertsByExpert
from tests.dtensor.models import make, meshes
from tests.ranks import ranks

NORM_TYPES = [1, 2, 3.5, math.inf]


def _with_gradient(grad):
    parameter = torch.nn.Parameter(grad.detach().clone())
    parameter.grad = grad
    return parameter


def _norm(gradients, norm_type):
    return torch.cat([g.flatten() for g in gradients]).double().norm(norm_type).item()


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@ranks(4)
def test_norm_counts_every_gradient_once(norm_type):
    """Sharded over both dims of the mesh, over one, or over none; known to DTensor or not. Sizes are odd."""
    mesh, dp_cp = meshes(dp=2, tp=2)
    both, tp = mesh["dp", "tp"], mesh["tp"]
    wholes = [torch.randn(7, 3), torch.randn(5), torch.randn(3, 4), torch.randn(6), torch.randn(3, 2)]
    wholes += [torch.randn(9), torch.randn(2)]
    layouts = [
        (both, [Shard(0), Shard(1)]),
        (both, [Shard(0), Replicate()]),  # a norm under sequence parallelism
        (both, [Replicate(), Shard(1)]),
        (dp_cp, [Shard(0)]),  # a norm that tensor parallelism leaves alone: its mesh has no tp
        (tp, [Replicate()]),
        (meshes(dp=4)[1], [Replicate()]),
    ]
    gradients = [
        torch.distributed.tensor.distribute_tensor(x, *layout) for x, layout in zip(wholes, layouts, strict=False)
    ]
    gradients.append(wholes[-1])  # no DTensor: the same on all ranks
    parameters = [*(_with_gradient(g) for g in gradients), torch.nn.Parameter(torch.zeros(2))]
    norm = get_grad_norm(parameters, dp_cp.get_group(), tp.get_group(), norm_type, dtype=torch.float64)
    assert norm == pytest.approx(_norm(wholes, norm_type), rel=1e-12)
    again = get_grad_norm(iter(parameters), dp_cp_group=dp_cp.get_group(), tp_group=tp.get_group(), norm_type=norm_type)
    assert again == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_norm_in_one_process(norm_type):
    gradients = [torch.randn(7, 3), torch.randn(5)]
    parameters = [_with_gradient(g) for g in gradients]
    assert get_grad_norm(parameters, norm_type=norm_type) == pytest.approx(_norm(gradients, norm_type), rel=1e-6)
    assert get_grad_norm(parameters[0], norm_type=norm_type) == pytest.approx(_norm(gradients[:1], norm_type), rel=1e-6)
    assert get_grad_norm([torch.nn.Parameter(torch.zeros(2))]) == get_grad_norm([]) == 0.0


@ranks(2)
def test_a_partial_gradient_is_refused():
    mesh = meshes(tp=2)[0]["tp"]
    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    object.__setattr__(parameter, "grad", grad)
    with pytest.raises(ValueError, match="Partial"):
        get_grad_norm(parameter, tp_group=mesh.get_group())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_clip_is_in_place_for_any_dtype(dtype):
    grad = torch.randn(5, 7).to(dtype)
    parameter = _with_gradient(grad.clone())
    memory = parameter.grad.data_ptr()
    clip_grad_by_total_norm_(parameter, 1.0, 4.0)
    assert parameter.grad.data_ptr() == memory
    torch.testing.assert_close(parameter.grad, (grad.float() * (1.0 / (4.0 + 1e-6))).to(dtype))
    clipped = parameter.grad.clone()
    clip_grad_by_total_norm_([parameter], 1.0, torch.tensor(0.5))
    assert parameter.grad.equal(clipped)


@ranks(2)
def test_clip_writes_into_shards():
    mesh = meshes(dp=2)[0]["dp"]
    whole = torch.randn(5, 3).bfloat16()
    parameter = _with_gradient(torch.distributed.tensor.distribute_tensor(whole, mesh, [Shard(0)]))
    norm = get_grad_norm(parameter, mesh.get_group())
    assert norm == pytest.approx(_norm([whole], 2), rel=1e-6)
    clip_grad_by_total_norm_(parameter, 0.1, norm)
    assert get_grad_norm(parameter, mesh.get_group()) == pytest.approx(0.1, rel=1e-2)  # bf16
    local = to_local_if_dtensor(parameter)
    assert type(local) is torch.Tensor
    assert not local.requires_grad
    assert to_local_if_dtensor(whole) is whole


@ranks(2)
def test_a_rank_without_tokens_adds_nothing_to_its_experts():
    """All tokens choose experts of the first rank; on the second FSDP2 still wants gradients, which are 0."""
    whole = make("olmoe").model.layers[0].mlp.experts
    own, mesh = copy.deepcopy(whole), meshes(tp=2)[0]["tp"]
    ExpertsByExpert()._apply(own, mesh)
    found = []
    for experts in (whole, own):
        hidden = torch.linspace(-1, 1, 3 * 32).view(3, 32).requires_grad_()
        weights = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]]).requires_grad_()
        out = experts(hidden, torch.tensor([[0, 1], [1, 0], [0, 1]]), weights)
        out.square().sum().backward()
        found.append([out, hidden.grad, weights.grad, *(to_local_if_dtensor(p.grad) for p in experts.parameters())])
    half = slice(0, 2) if mesh.get_local_rank() == 0 else slice(2, 4)
    wanted = [*found[0][:3], *(grad[half] for grad in found[0][3:])]
    for a, b in zip(found[1], wanted, strict=True):
        torch.testing.assert_close(a, b)
