"""The values of every collective, under both names that torch has had for it, and what torch builds on them."""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from megatron_ext.distributed.counting import count_collectives
from megatron_on_cpu.nccl_rules import NcclRules
from tests.ranks import ranks

pytestmark = pytest.mark.slow

# Before 2.13 torch has the older names alone.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
RULES = NcclRules(order="raise", device_is_set=True)
EAGER = NcclRules(order="raise", device_is_set=True, eager=True)
OPS = {
    dist.ReduceOp.SUM: lambda x: x.sum(0),
    dist.ReduceOp.AVG: lambda x: x.mean(0) if x.is_floating_point() else x.sum(0).div(len(x), rounding_mode="trunc"),
    dist.ReduceOp.PRODUCT: lambda x: x.prod(0),
    dist.ReduceOp.MIN: lambda x: x.amin(0),
    dist.ReduceOp.MAX: lambda x: x.amax(0),
}


def of_all_ranks(*shape, dtype=torch.float32):
    """[ranks, *shape], the same on every rank."""
    torch.manual_seed(5)
    return (torch.randn(dist.get_world_size(), *shape) * 8).round().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
@ranks(2, 4, rules=RULES)
def test_reductions(dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = of_all_ranks(size, 3, dtype=dtype)
    for op, expected in OPS.items():
        wanted = expected(everyone).to(dtype)
        x = everyone[rank].clone()
        dist.all_reduce(x, op)
        torch.testing.assert_close(x, wanted)
        x = everyone[rank].clone()
        dist.reduce(x, size - 1, op)
        torch.testing.assert_close(x, wanted if rank == size - 1 else everyone[rank])
        piece = torch.empty(3, dtype=dtype)
        reduce_scatter_single(piece, everyone[rank], op)
        torch.testing.assert_close(piece, wanted[rank])
        dist.reduce_scatter(piece.zero_(), list(everyone[rank]), op)
        torch.testing.assert_close(piece, wanted[rank])
        renamed = hasattr(dist, "reduce_scatter_single")  # where torch has the new name it warns of the old one
        with pytest.warns(FutureWarning) if renamed else contextlib.nullcontext():
            dist.reduce_scatter_tensor(piece.zero_(), everyone[rank], op)
        torch.testing.assert_close(piece, wanted[rank])


@ranks(2, rules=RULES)
def test_a_sum_of_booleans_is_their_or():
    x = torch.tensor([True, dist.get_rank() == 0, False])
    dist.all_reduce(x)
    assert x.tolist() == [True, True, False]


@ranks(2, 4, rules=RULES)
def test_gathers():
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = of_all_ranks(2, 3)
    for gather in (all_gather_single, dist.all_gather_into_tensor):
        whole = torch.empty(size, 2, 3)
        gather(whole, everyone[rank].clone())
        assert torch.equal(whole, everyone)
    uneven = [torch.empty(r, 2) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank, 2), float(rank)))
    assert all(torch.equal(x, torch.full((r, 2), float(r))) for r, x in enumerate(uneven))
    found = [torch.empty(2, 3) for _ in range(size)] if rank == 1 else None
    dist.gather(everyone[rank].clone(), found, dst=1)
    assert found is None or torch.equal(torch.stack(found), everyone)
    x = torch.empty(2, 3)
    dist.scatter(x, list(everyone) if rank == 1 else None, src=1)
    assert torch.equal(x, everyone[rank])
    x = everyone[rank].clone()
    dist.broadcast(x, 1)
    assert torch.equal(x, everyone[1])


@ranks(2, 4, rules=RULES)
def test_all_to_all():
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = of_all_ranks(size, 2)
    x = torch.empty(size, 2)
    dist.all_to_all_single(x, everyone[rank].clone())
    assert torch.equal(x, everyone[:, rank])
    # Rank r sends r + s rows to rank s.
    sent = torch.cat([torch.full((rank + s, 1), 10.0 * rank + s) for s in range(size)])
    splits = [rank + s for s in range(size)]
    received = torch.empty(sum(splits), 1)
    dist.all_to_all_single(received, sent, splits, splits)
    assert torch.equal(received, torch.cat([torch.full((s + rank, 1), 10.0 * s + rank) for s in range(size)]))
    pieces = [torch.empty(s + rank, 1) for s in range(size)]
    dist.all_to_all(pieces, list(sent.split(splits)))
    assert torch.equal(torch.cat(pieces), received)


@ranks(2, rules=RULES)
def test_coalesced():
    rank, x, y = dist.get_rank(), torch.ones(2), torch.full((3,), 2.0)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as work:
        dist.all_reduce(x)
        dist.all_reduce(y)
    work.wait()
    assert (x.tolist(), y.tolist()) == ([2, 2], [4, 4, 4])
    outputs = [torch.empty(2), torch.empty(4)]
    with dist.distributed_c10d._coalescing_manager():
        for output in outputs:
            all_gather_single(output, torch.full((len(output) // 2,), float(rank)))
    assert [output.tolist() for output in outputs] == [[0, 1], [0, 0, 1, 1]]
    with dist.distributed_c10d._coalescing_manager():
        for output in outputs:
            reduce_scatter_single(output, torch.arange(2.0 * len(output)))
    assert outputs[0].tolist() == [4.0 * rank, 4.0 * rank + 2]


@ranks(2, rules=RULES)
def test_modes_see_what_is_sent():
    x = torch.ones(2)
    with count_collectives() as counts:
        dist.all_reduce(x)
        all_gather_single(torch.empty(4), x)
        dist.broadcast(x, 0)
        dist.barrier()
    assert counts == {"allreduce": 1, "allgather_base": 1, "broadcast": 1}


@ranks(2, rules=RULES)
def test_callbacks_of_futures_run_where_they_are_added():
    """NCCL's futures are complete at launch, so that their callbacks may launch more."""
    x, threads = torch.ones(2), []

    def launch_more(done):
        threads.append(threading.get_ident())
        dist.all_reduce(x)
        return done.value()[0] * 10

    future = dist.all_reduce(x, async_op=True).get_future().then(launch_more)
    assert threads == [threading.get_ident()]
    dist.broadcast(x, 0)
    assert future.wait().tolist() == [40, 40]


@ranks(2, rules=RULES)
def test_minimum_and_maximum_skip_nan():
    nan, rank = float("nan"), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            x = torch.tensor([nan, 2.0, nan] if rank else [1.0, nan, nan], dtype=dtype)
            dist.all_reduce(x, op)
            assert x[:2].tolist() == [1, 2]
            assert x[2].isnan()


@ranks(2, rules=RULES)
def test_premultiplied_sum():
    x = torch.tensor([1.0, 2.0]) + dist.get_rank()
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert x.tolist() == [1.5, 2.5]
    piece = torch.empty(1)
    reduce_scatter_single(piece, torch.tensor([1.0, 2.0]), dist._make_nccl_premul_sum(0.25))
    assert piece.tolist() == [0.5 + 0.5 * dist.get_rank()]
    with pytest.raises(TypeError, match="PREMUL_SUM of torch.int64"):
        dist.all_reduce(torch.ones(2).long(), dist._make_nccl_premul_sum(0.5))


@ranks(2, rules=RULES)
def test_divide_factor_of_fsdp2():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    model.set_gradient_divide_factor(8.0)
    x = torch.ones(2, 4) * (1 + dist.get_rank())
    model(x).sum().backward()
    torch.testing.assert_close(model.weight.grad.to_local(), torch.full((2, 4), 6 / 8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@ranks(2, rules=RULES)
def test_sums_of_eight_bits(dtype):
    """Hopper has them."""
    x = torch.tensor([1.0, 2.5]).to(dtype)
    dist.all_reduce(x)
    assert x.float().tolist() == [2, 5]
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.float().tolist() == [2, 5]


@ranks(2, rules=RULES)
def test_dense_messages_of_any_order():
    x = torch.arange(6.0).view(2, 3)
    y = torch.empty(3, 2).t()
    if dist.get_rank() == 0:
        dist.send(x.t().contiguous().t(), 1)
    else:
        dist.recv(y, 0)
        assert torch.equal(y, x)


@ranks(2, rules=RULES)
def test_lists_of_strided_tensors():
    rank, whole = dist.get_rank(), torch.zeros(3, 4)
    outputs = [whole[:, 0], whole[:, 2]]
    dist.all_gather(outputs, torch.arange(3.0) + 10 * rank)
    assert torch.equal(whole, torch.tensor([[i, 0, 10.0 + i, 0] for i in range(3)]))
    piece = torch.empty(3)
    dist.reduce_scatter(piece, [whole[:, 0], whole[:, 2]])
    assert torch.equal(piece, 2 * (torch.arange(3.0) + 10 * rank))


@ranks(2, rules=RULES)
def test_empty_collectives_are_discarded():
    """NCCL does not let ranks meet for them, so that one may leave them out."""
    if dist.get_rank() == 0:
        empty = torch.empty(0)
        assert dist.all_reduce(empty, async_op=True).get_future().value()[0] is empty
        dist.broadcast(empty, 0)
        all_gather_single(torch.empty(0), empty)
        reduce_scatter_single(torch.empty(0), empty)
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as work:
            dist.all_reduce(empty)
        work.wait()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


@ranks(2, rules=RULES)
def test_inference_and_views():
    rank = dist.get_rank()
    with torch.inference_mode():
        x = torch.full((2,), float(rank))
        dist.all_reduce(x)
    assert x.tolist() == [1, 1]
    image = torch.full((2, 3, 4, 5), float(rank + 1)).to(memory_format=torch.channels_last)
    image[:, 1] += 1
    dist.all_reduce(image)
    assert torch.equal(image[:, 1], torch.full((2, 4, 5), 5.0))
    assert torch.equal(image[:, 0], torch.full((2, 4, 5), 3.0))
    resized = torch.ones(4)
    dist.all_reduce(resized)
    resized.untyped_storage().resize_(0)  # as FSDP frees what it has gathered
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    all_gather_single(torch.empty(0, 3), empty)
    z = torch.tensor([1 + 1j, 2j]) * (rank + 1)
    dist.all_reduce(z)
    assert z.tolist() == [3 + 3j, 6j]


@ranks(4, rules=EAGER)
def test_groups_of_an_eager_world():
    check_groups()


@ranks(4, rules=RULES)
def test_groups_of_a_lazy_world():
    check_groups()


def check_groups():
    rank = dist.get_rank()
    for ranks_of_group in ([0, 1], [2, 3], [0, 2], [1, 3], [1], [0, 1, 2, 3]):
        group = dist.new_group(ranks_of_group)
        if rank in ranks_of_group:
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(ranks_of_group)
            if len(ranks_of_group) > 1:
                low, high = ranks_of_group[0], ranks_of_group[-1]
                if rank == low:
                    dist.send(x, high, group=group)
                elif rank == high:
                    dist.recv(x, low, group=group)
    if dist.group.WORLD.rules.eager:
        half = dist.split_group(split_ranks=[[1, 0], [3]])
        assert (half is None) == (rank == 2)
        if half is not None:
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=half)
            assert x.item() == (1 if rank < 2 else 3)
            assert dist.get_process_group_ranks(half) == ([0, 1] if rank < 2 else [3])
    else:
        with pytest.raises(RuntimeError, match="device_id"):
            dist.split_group(split_ranks=[[0, 1], [2, 3]])
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mesh.get_group("tp"))
    assert x.item() == (1 if rank < 2 else 5)


def train(model, x, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def a_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def mean_over_ranks(losses):
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses


@ranks(2, rules=RULES)
def test_ddp():
    torch.manual_seed(3)
    batch = torch.randn(6, 4)
    mine = batch[dist.get_rank() * 3 :][:3]
    model = nn.parallel.DistributedDataParallel(a_model())
    torch.testing.assert_close(mean_over_ranks(train(model, mine)), train(a_model(), batch))
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(a_model())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    torch.testing.assert_close(mean_over_ranks(train(model, mine)), train(a_model(), batch), rtol=2e-3, atol=0)


@ranks(2, rules=EAGER)
def test_fsdp2():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    batch = torch.randn(6, 4)
    model = a_model()
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    mine = batch[dist.get_rank() * 3 :][:3]
    torch.testing.assert_close(mean_over_ranks(train(model, mine)), train(a_model(), batch))


@ranks(2, rules=RULES)
def test_dtensor():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(2)
    whole = torch.randn(4, 6)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(x.full_tensor(), whole)
    assert torch.equal(x.redistribute(mesh, [Shard(1)]).to_local(), whole.chunk(2, 1)[dist.get_rank()])
    parts = DTensor.from_local(torch.full((4, 6), 1.0 + dist.get_rank()), mesh, [Partial()])
    assert torch.equal(parts.redistribute(mesh, [Replicate()]).to_local(), torch.full((4, 6), 3.0))
    assert torch.equal(parts.redistribute(mesh, [Shard(0)]).to_local(), torch.full((2, 6), 3.0))
    torch.testing.assert_close(x.sum().full_tensor(), whole.sum())


@ranks(2, rules=RULES)
def test_functional_collectives_and_their_gradients():
    from torch.distributed.nn import functional as differentiable

    rank, group = dist.get_rank(), dist.group.WORLD
    x = torch.full((2, 3), float(rank))
    assert functional.all_gather_tensor(x, 0, group)[:, 0].tolist() == [0, 0, 1, 1]
    assert functional.reduce_scatter_tensor(x, "sum", 0, group).tolist() == [[1, 1, 1]]
    assert functional.all_to_all_single(x, None, None, group)[:, 0].tolist() == [0, 1]
    y = torch.ones(2, requires_grad=True)
    (differentiable.all_reduce(y * (rank + 1)).sum() * 2).backward()
    assert y.grad.tolist() == [4.0 * (rank + 1)] * 2


@ranks(2, rules=RULES)
def test_a_world_after_a_world():
    """The group can be destroyed and made again; a sub-group's end is no end of the others."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    dist.all_reduce(torch.ones(1))
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("nccl_rules", store=store, rank=rank, world_size=2)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2
